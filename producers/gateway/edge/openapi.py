"""The OpenAPI document, with nulls kept in its examples."""

from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts


def install(app: FastAPI) -> None:
    """Restore nulls in examples of answers: FastAPI drops them, and with them fields that the schema requires."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for context in iter_route_contexts(app.routes):
                route = context.original_route
                if isinstance(route, APIRoute) and route.include_in_schema and context.path is not None:
                    for method in route.methods or ():
                        _restore(document["paths"][context.path][method.lower()]["responses"], route)
        made = app.openapi_schema
        assert made is not None  # noqa: S101 - kept by FastAPI's own
        return made

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def _restore(answers: dict[str, Any], route: APIRoute) -> None:
    for status, answer in route.responses.items():
        for media_type, content in answer.get("content", {}).items():
            if "example" in content:
                answers[str(status)]["content"][media_type]["example"] = content["example"]
