"""Parses command line options. Pure; every mistake is a ValueError that names the option."""

import json
import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from producers.backfill.job import Format
from producers.backfill.rows import FIELD_NAMES

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WINDOW = re.compile(r"(\d{1,6})([smhd])")
MOST_ROWS_UNDER_WAY = 20_000
"""What is known of them, and their answers, are in memory."""

MOST_WINDOW_MS = 14 * 86_400_000
"""As long as a backfill topic keeps what is in it."""


def pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    """``NAME=FIELD`` as a mapping. Raises ValueError."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not (separator and name and value):
            raise ValueError(f"{option} {text!r}: must be NAME=VALUE")
        if value not in FIELD_NAMES:
            raise ValueError(f"{option} {text!r}: {value!r} is none of {', '.join(sorted(FIELD_NAMES))}")
        found[name] = value
    return found


def defaults_of(given: Iterable[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` as fields; a value that is JSON is taken as that. Raises ValueError."""
    found: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name not in FIELD_NAMES - {"id", "custom_id"}:
            raise ValueError(f"--default {text!r}: must be FIELD=VALUE")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def window_ms(text: str) -> int:
    """``24h`` in milliseconds. Raises ValueError."""
    found = _WINDOW.fullmatch(text)
    window = 0 if found is None else int(found[1]) * _UNITS_MS[found[2]]
    if not 1_000 <= window <= MOST_WINDOW_MS:
        raise ValueError(f"--completion-window {text!r}: must be from 1s to 14d, for instance 90s, 30m, 24h")
    return window


def check_rows_under_way(chunk_rows: int, max_open_chunks: int) -> None:
    """Raises ValueError when there would be too many."""
    if chunk_rows * max_open_chunks > MOST_ROWS_UNDER_WAY:
        raise ValueError(
            f"--chunk-rows {chunk_rows} times --max-open-chunks {max_open_chunks}: "
            f"at most {MOST_ROWS_UNDER_WAY} rows may be under way"
        )


def format_of(url: str, otherwise: Format) -> Format:
    """What the end of a name says."""
    ending = PurePosixPath(url).suffix.lstrip(".").lower()
    return Format(ending) if ending in set(Format) else otherwise
