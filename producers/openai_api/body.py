"""Parse and validate request bodies. Errors name the field and never quote the body.

Two bytes of JSON become an object of about 60 bytes, and the event loop makes about a million of them a second: a bound
on the bytes of a body bounds neither memory nor time.
"""

import re
from json import JSONDecoder
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from fairlane.outcomes import Code
from producers.openai_api.errors import INVALID_JSON, MISSING_PARAMETER, GatewayError

MOST_VALUES: Final = 50_000
"""Per body. 512 messages of several parts have a few thousand. Parsed in about 50 ms."""

_OPENING: Final = (b",", b"[", b"{")
"""Each value follows one of these, except the value of a key, counted with its key, and the outermost value."""


def has_too_many_values(raw: bytes, most: int = MOST_VALUES) -> bool:
    """Whether the text has more than ``most`` values. For invalid JSON the result is meaningless, but as fast."""
    if _count(raw) <= most:
        # An upper bound: it includes marks inside strings.
        return False
    # Without escapes, every quotation mark begins or ends a string.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * most:
        return True
    return _count(b'""'.join(plain.split(b'"')[::2])) > most


def _count(raw: bytes) -> int:
    return sum(raw.count(mark) for mark in _OPENING)


ModelT = TypeVar("ModelT", bound=BaseModel)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def parse(model: type[ModelT], raw: bytes) -> ModelT:
    """Parse a body as ``model``.

    Raises:
        GatewayError: 400: too many values, not UTF-8, invalid JSON (such as ``NaN`` or ``Infinity``), nested too
            deeply, a duplicate key in an object, or invalid for the model; ``field`` names the place, if known.
    """
    if has_too_many_values(raw):
        raise GatewayError(400, INVALID_JSON, f"the body has more than {MOST_VALUES} values", field="body")
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        # The message says what was expected and where, and quotes nothing of the body.
        raise GatewayError(400, INVALID_JSON, f"the body is no valid JSON: {error}", field="body") from None
    try:
        # Parsers differ in which duplicate they take. The body is known to be UTF-8 and not deep.
        _KEYS.decode(raw.decode())
    except _RepeatedKeyError as error:
        field = error.name if _NAME.fullmatch(error.name) else None
        raise GatewayError(400, Code.INVALID, f"{field or 'a field'}: is there twice", field=field) from None
    return validated(model, value)


class _RepeatedKeyError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def _no_key_twice(pairs: list[tuple[str, object]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RepeatedKeyError(name)
            seen.add(name)


def _nothing(_text: str) -> None:
    """Ignore a number: Python raises for integers of more than 4,300 digits, and only keys matter here."""


_KEYS = JSONDecoder(object_pairs_hook=_no_key_twice, parse_int=_nothing, parse_float=_nothing)


def validated(model: type[ModelT], value: object) -> ModelT:
    """Validate parsed JSON. Raises GatewayError: 400."""
    if not isinstance(value, dict):
        raise GatewayError(400, INVALID_JSON, "the body must be a JSON object")
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _refusal(first) from None


def _refusal(error: ErrorDetails) -> GatewayError:
    field = _path(error["loc"]) or None
    if error["type"] == "missing":
        return GatewayError(400, MISSING_PARAMETER, f"{field}: must be given", field=field)
    # Without the input, pydantic's message does not show the value.
    return GatewayError(400, Code.INVALID, error["msg"] if field is None else f"{field}: {error['msg']}", field=field)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _NAME.fullmatch(part):
            path += f".{part}" if path else part
        else:
            # A key of a mapping is the caller's text, which is not quoted.
            break
    return path
