"""Values that Postgres can store: text and JSON without NUL characters, JSON without NaN."""

import json
import math
from typing import Any

from fairlane_server.text import without_nul

_ESCAPED_NUL = "\\u0000"
# Plain characters: escaped, Chinese would be twice as long and an emoji three times. Control characters stay escaped.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)
_LEFT_OUT = " … "


def storable(value: Any) -> Any:
    """A value for a column: strings without NUL, everything else as it is."""
    return without_nul(value) if type(value) is str else value


def without_middle(text: str, most_characters: int) -> str:
    """The text, or its beginning and its end with a mark between them: at most so many characters."""
    if len(text) <= most_characters:
        return text
    half = (most_characters - len(_LEFT_OUT)) // 2
    return f"{text[:half]}{_LEFT_OUT}{text[-half:]}"


def json_text(value: Any) -> str:
    """JSON for a ``jsonb`` column. NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity"."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_clean(value))
    return _ENCODER.encode(_clean(value)) if _ESCAPED_NUL in text else text


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {storable(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return storable(value)
