"""Values as Postgres can store them. Its text and JSON hold no NUL character, its JSON no NaN."""

import json
import math
from typing import Any

NUL = "\x00"
NUL_PICTURE = "\u2400"
"""SYMBOL FOR NULL, what a NUL is stored as: visible, and the row is not lost."""

_ESCAPED_NUL = "\\u0000"
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def storable(value: Any) -> Any:
    """A value for a column: strings without NUL, everything else as it is."""
    return value.replace(NUL, NUL_PICTURE) if type(value) is str and NUL in value else value


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
