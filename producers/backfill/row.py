"""A row in progress: as read, and as a request. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.records import InferenceRequest


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be run.

    Attributes:
        row_id: what the row calls itself, if that can be told.
        field: what is wrong, ``row`` when it is the row as a whole.
        reason: why.
        url: of an OpenAI batch line.
    """

    row_id: str | None
    field: str
    reason: str
    url: str | None = None


@dataclass(frozen=True, slots=True)
class GoodRow:
    """A row that can be run, and the request it is, but for its id, its deadline and where its reply goes."""

    row_id: str | None
    request: InferenceRequest
    url: str | None = None


ParsedRow = GoodRow | BadRow
RowContent = bytes | Mapping[str, Any] | BadRow
"""A line of JSON, or the columns of a row, or why it could not even be read."""
