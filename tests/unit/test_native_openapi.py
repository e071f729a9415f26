"""The OpenAPI document of the native routes: complete, its examples work, and the routes keep to it whatever comes."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fairlane.clock import now_ms
from fairlane.outcomes import Decision
from producers.gateway.native import documents
from tests.unit.native_kit import KEY, Bench, decided, recorded

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
ROUTES = {
    ("POST", "/v1/requests"),
    ("GET", "/v1/requests"),
    ("GET", "/v1/requests/{request_id}"),
    ("DELETE", "/v1/requests/{request_id}"),
    ("GET", "/v1/requests/{request_id}/events"),
    ("GET", "/v1/results/{request_id}"),
    ("POST", "/v1/rank"),
    ("POST", "/v1/classify"),
    ("POST", "/inference"),
    ("GET", "/results/{request_id}"),
}


def made() -> Bench:
    bench = Bench(wait_s=1.0)
    bench.store.record(recorded(1, request_id=documents.EXAMPLE_ID, at_ms=now_ms()))
    bench.store.decide(decided(Decision.ACCEPTED, 1, request_id=documents.EXAMPLE_ID))
    return bench


@pytest.fixture(scope="module")
def bench() -> Bench:
    return made()


@pytest.fixture(scope="module")
def document(bench: Bench) -> dict[str, Any]:
    return bench.app.openapi()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_every_route_is_in_it_with_all_its_answers(document: dict[str, Any]) -> None:
    assert {(method, path) for method, path, _ in operations(document)} == ROUTES
    for method, path, operation in operations(document):
        assert operation["summary"], path
        assert operation["description"], path
        statuses = set(operation["responses"])
        assert {"400", "401", "403", "404", "429", "503", "default"} <= statuses, path
        assert {status for status in statuses if status.startswith("2")}, path
        if method == "POST":
            assert {"409", "413", "422", "500", "504"} <= statuses, path
            content = operation["requestBody"]["content"]["application/json"]
            assert content["examples"], path
            assert "$ref" not in json.dumps(content), path
            assert "Idempotency-Key" in {parameter["name"] for parameter in operation["parameters"]}, path
        for status, answer in operation["responses"].items():
            assert answer["description"], (path, status)
            assert answer["content"], (path, status)


def test_every_example_is_a_request_that_is_taken(bench: Bench, document: dict[str, Any]) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        for method, path, operation in operations(document):
            if method == "POST":
                for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
                    answer = await http.post(path, json=example["value"])
                    # The scripted model knows neither digits nor collections.
                    assert answer.status_code in (200, 202, 404), answer.text

    bench.run(test)


# schemathesis draws from `random` in its own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((*route, GenerationMode.POSITIVE) for route in sorted(ROUTES)),
        # Any string may stand in a path.
        *((*route, GenerationMode.NEGATIVE) for route in sorted(ROUTES) if "{" not in route[1]),
    ],
)
def test_whatever_comes_is_answered_as_it_says(
    bench: Bench, document: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.app = bench.app
    operation = schema[path][method]

    @settings(
        derandomize=True,
        database=None,
        max_examples=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case[Any]) -> None:
        answer = case.call(headers={"authorization": f"Bearer {KEY}"})
        case.validate_response(answer, checks=CHECKS)
        # Again without an identity, which comes before all else.
        assert case.call().status_code in (401, 404, 405, 413)

    check()
