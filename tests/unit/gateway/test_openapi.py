"""The OpenAPI document of the gateway: complete, with examples that hold, and its routes keep to it whatever comes."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from jsonschema_rs import Draft202012Validator
from schemathesis import GenerationMode

from producers.gateway import openapi
from tests.kit.openapi_kit import (
    CONVERSATIONS,
    DOCUMENTS,
    FILES,
    HEALTH,
    NATIVE,
    OPENAI,
    Probe,
    Route,
    gateway,
    modes,
    operations,
    probing,
    scripted,
)

ALL = NATIVE | OPENAI | FILES | DOCUMENTS | CONVERSATIONS | HEALTH
IDEMPOTENT = {
    *((method, path) for method, path in NATIVE | OPENAI if method == "POST"),
    ("POST", "/v1/batches"),
} - {("POST", "/v1/feedback")}
EXAMPLES = 8


@pytest.fixture(scope="module")
def probe() -> Iterator[Probe]:
    with probing(gateway(bench=scripted())) as probe:
        yield probe


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return gateway().openapi()


def asked(app: FastAPI, path: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            return await client.get(path)

    return asyncio.run(ask())


def contents(operation: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What an operation takes and answers: ``body`` or a status, the media type, and what is said of it."""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield "body", media_type, content
    for status, answer in operation["responses"].items():
        for media_type, content in answer["content"].items():
            yield status, media_type, content


def examples(content: dict[str, Any]) -> list[Any]:
    one = [content["example"]] if "example" in content else []
    named = [entry["value"] for entry in content.get("examples", {}).values()]
    return [*one, *named, *content.get("schema", {}).get("examples", ())]


def routes_of(app: FastAPI) -> set[Route]:
    """As they are served, in the document or not."""
    routes = (context for context in iter_route_contexts(app.routes) if isinstance(context.original_route, APIRoute))
    # The document names a parameter that may hold slashes as any other.
    return {(method, (route.path or "").replace(":path}", "}")) for route in routes for method in route.methods or ()}


def test_every_route_is_in_it_and_tried(document: dict[str, Any]) -> None:
    assert set(operations(document)) == ALL == routes_of(gateway())


def test_every_route_says_what_it_takes_and_answers(document: dict[str, Any]) -> None:
    assert "HTTPValidationError" not in json.dumps(document), "no caller is ever told that"
    for route, operation in operations(document).items():
        method, path = route
        assert operation["summary"], route
        assert operation["description"], route
        statuses = set(operation["responses"])
        assert {status for status in statuses if status.startswith("2")}, route
        if route not in HEALTH:
            assert {"401", "403", "404", "429", "503", "default"} <= statuses, route
        if route in FILES | NATIVE | DOCUMENTS | CONVERSATIONS or method == "POST":
            assert "400" in statuses, route
        if method == "POST" and "{" not in path:
            assert operation["requestBody"]["content"], route
            assert "413" in statuses, route
        keys = [one for one in operation.get("parameters", ()) if one["name"] == "Idempotency-Key"]
        assert len(keys) == (route in IDEMPOTENT), route
        assert ("422" in statuses) == (route in IDEMPOTENT), route
        for status, answer in operation["responses"].items():
            assert answer["description"], (route, status)
            assert answer["content"], (route, status)


def test_every_body_and_every_answer_has_an_example_that_is_one(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        for what, media_type, content in contents(operation):
            given = examples(content)
            assert given or what == "default", (route, what, media_type)
            if "schema" in content:
                assert content["schema"], (route, what, media_type)
                schema = {**content["schema"], "components": document["components"]}
                for example in given:
                    Draft202012Validator(schema).validate(example)
            if what == "body":
                assert "$ref" not in json.dumps(content), route


def test_errors_have_the_shape_of_their_path(document: dict[str, Any]) -> None:
    for route, operation in operations(document).items():
        for what, _media_type, content in contents(operation):
            if what[0] in "45" and route not in HEALTH:
                (example,) = examples(content)
                shape = {"message", "type", "param", "code"} if route in OPENAI | FILES else {"code", "message"}
                assert shape <= set(example["error"]), (route, what)


def test_it_is_served_unless_it_is_not_to_be(document: dict[str, Any]) -> None:
    app = gateway()
    assert asked(app, "/openapi.json").json() == document
    assert asked(app, "/docs").status_code == 200
    hidden = gateway(docs=False)
    assert [asked(hidden, path).status_code for path in ("/openapi.json", "/docs", "/redoc")] == [404] * 3
    assert asked(hidden, "/health").json() == {"status": "alive"}


@pytest.mark.parametrize("route", sorted(route for route in NATIVE | OPENAI if route[0] == "POST"), ids=str)
def test_every_example_is_a_call_that_is_taken(probe: Probe, route: Route) -> None:
    given = examples(operations(probe.document)[route]["requestBody"]["content"]["application/json"])
    for body in given:
        answer = probe.call(route, body=body, media_type="application/json")
        # The scripted pipeline has no model of digits.
        known = route[1] != "/v1/classify"
        assert answer.status_code in ((200, 202) if known else (404,)), answer.text


@pytest.mark.parametrize("route", sorted(route for route in NATIVE | OPENAI if route[0] != "POST"), ids=str)
def test_what_is_found_is_told_as_it_says(probe: Probe, route: Route) -> None:
    names = {"request_id": openapi.EXAMPLE_ID, "model": "smollm2-135m-instruct"}
    given = {name: value for name, value in names.items() if f"{{{name}}}" in route[1]}
    assert probe.call(route, path_parameters=given).status_code == 200


# schemathesis draws from `random` in its own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize(("method", "path", "mode"), modes(NATIVE | OPENAI | HEALTH))
def test_whatever_comes_is_answered_as_it_says(probe: Probe, method: str, path: str, mode: GenerationMode) -> None:
    probe.search(method, path, mode, EXAMPLES)
