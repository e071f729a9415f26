"""JSON Schemas of tenants: of the drafts from 4 to 2020-12, without references to other documents, and with patterns
that take linear time."""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jsonschema_rs

_MOST_PLACE_CHARACTERS = 200


def check_schema(schema: str) -> None:
    """Raises ValueError, with the reason, for a text that is no JSON Schema that can be used."""
    compiled(schema)


def unmet(value: Any, schema: str) -> str | None:
    """The place in the schema of the first keyword that the value does not satisfy, such as ``properties/age/type``;
    None if it satisfies all. Names nothing of the value.

    Raises ValueError for a schema that ``check_schema`` refuses, and for a value that is nested too deeply.
    """
    try:
        error = next(iter(compiled(schema).iter_errors(value)), None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return None if error is None else "/".join(map(str, error.schema_path))[:_MOST_PLACE_CHARACTERS]


@lru_cache(maxsize=64)
def compiled(schema: str) -> "jsonschema_rs.Validator":
    """Raises ValueError as ``check_schema``."""
    import jsonschema_rs

    try:
        parsed = json.loads(schema)
        if not isinstance(parsed, dict):
            raise ValueError("must be an object")  # noqa: TRY004 - a wrong value of a setting
        return jsonschema_rs.validator_for(parsed, offline=True, pattern_options=jsonschema_rs.RegexOptions())
    except jsonschema_rs.ValidationError as error:
        raise ValueError(f"not a JSON Schema that can be used: {error.message}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
