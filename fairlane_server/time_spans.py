"""Parse time spans such as ``90s`` or ``7d``. Pure."""

import re

_SPAN = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def span_ms(text: str) -> int | None:
    """Milliseconds of ``90s``, ``30m``, ``2h`` or ``7d``; None for any other text."""
    found = _SPAN.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_MS[found[2]]
