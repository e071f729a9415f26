"""Who may call which route of the admin API, as it is assembled, and its OpenAPI document."""

from typing import Any

import pytest
from fastapi import FastAPI
from jsonschema_rs import Draft202012Validator
from starlette.testclient import TestClient

from fairlane.settings import Settings
from fairlane_server.api_keys.permissions import OF_DEPLOYMENT
from fairlane_server.caching.entries import Canonical
from producers.gateway.native.cursors import Cursors
from tests.kit.admin_kit import admin_api
from tests.kit.permission_matrix import ScriptedAuthenticator, deviations, routes_of, undeclared


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return admin_api(Settings(), ScriptedAuthenticator()).app


def test_every_route_declares_one_permission_of_the_deployment(app: FastAPI) -> None:
    assert undeclared(app) == []
    assert {permission for route in routes_of(app) for permission in route.permissions} == OF_DEPLOYMENT


def test_every_route_lets_in_whom_the_table_names_and_nobody_else(app: FastAPI) -> None:
    calls, wrong = deviations(app)
    assert wrong == []
    assert calls > 500


def test_every_operation_is_documented(app: FastAPI) -> None:
    document: dict[str, Any] = app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], (method, path)
            assert operation["tags"], (method, path)
            if path.startswith("/v1/admin"):
                assert operation["x-permission"], (method, path)
                assert {"401", "403", "503"} <= operation["responses"].keys(), (method, path)


def test_every_example_holds(app: FastAPI) -> None:
    document = app.openapi()
    checked = 0
    for methods in document["paths"].values():
        for operation in methods.values():
            for content in _contents(operation):
                schema = {**content["schema"], "components": document["components"]}
                examples = [one["value"] for one in content.get("examples", {}).values()]
                for example in (*examples, *([content["example"]] if "example" in content else [])):
                    Draft202012Validator(schema).validate(example)
                    checked += 1
    assert checked > 50


def _contents(operation: dict[str, Any]) -> list[dict[str, Any]]:
    bodies = [operation.get("requestBody", {}), *operation["responses"].values()]
    return [content for body in bodies for content in body.get("content", {}).values() if "schema" in content]


@pytest.mark.parametrize(
    ("path", "query", "place"),
    [
        ("keys", ("_deployment", None, False), "0123456789abcde\0"),
        ("users", ("_deployment", None), ("acme", "u\0")),
        ("audit", ("_deployment", None, None, None, None, None), 2**63),
        ("tenants", "_deployment", "a\0"),
        ("models", "_deployment", "m\0"),
        ("evaluations/acme/sets", ("_deployment", "acme", None), ("a\0", 1)),
        ("evaluations/acme/runs", ("_deployment", "acme", None, None), (2**63, "a")),
        ("labels/acme/export", ("_deployment", "acme", "evaluation", None), (1, "a\0")),
    ],
)
def test_a_cursor_that_postgres_cannot_hold_is_an_error_of_the_caller(
    app: FastAPI, path: str, query: Canonical, place: object
) -> None:
    cursors: Cursors[object] = Cursors(object)
    answer = TestClient(app).get(
        f"/v1/admin/{path}",
        params={"cursor": cursors.encode(query, place)},
        headers={"authorization": "admin of the deployment"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["field"]) == (400, "invalid", "cursor")
