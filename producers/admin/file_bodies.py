"""Bodies of calls that have the keys of a configuration file, and are read by its parser."""

from collections.abc import Callable
from typing import Any, TypeVar

from fairlane.outcomes import Code
from fairlane_server.yaml_config import ConfigError
from producers.openai_api.body import MOST_VALUES, has_too_many_values
from producers.openai_api.errors import INVALID_JSON, GatewayError

T = TypeVar("T")


def parsed(read: Callable[[bytes], T], raw: bytes) -> T:
    """What ``read`` makes of a body. Raises GatewayError: 400 with the key at fault."""
    if has_too_many_values(raw):
        raise GatewayError(400, INVALID_JSON, f"the body has more than {MOST_VALUES} values", field="body")
    try:
        return read(raw)
    except ConfigError as error:
        raise GatewayError(400, Code.INVALID, error.message, field=error.key or "body") from None


def file_body(description: str, summary: str, example: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI request body of such a call, with an example."""
    examples = {summary.lower().replace(" ", "_"): {"summary": summary, "value": example}}
    content = {"application/json": {"schema": {"type": "object"}, "examples": examples}}
    return {"requestBody": {"required": True, "description": description, "content": content}}
