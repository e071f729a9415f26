"""Filters, times and offsets that select dead letters."""

from datetime import UTC, datetime

import pytest

from fairlane import headers as header_names
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane_server.dead_letters.letters import Letter, StoredRecord
from fairlane_server.dead_letters.selection import OffsetRange, Selection, parse_offsets, parse_time

NOW_MS = 1_800_000_000_000
HOUR_MS = 3_600_000


def letter(offset: int = 5, *, tenant: str = "acme", model: str = "words", died_at_ms: int = NOW_MS) -> Letter:
    place = SourceCoordinate("dead-letter.work", 0, offset)
    found = {header_names.DLT_EXCEPTION_CLASS: b"inference_consumers.results.records.PoisonError"}
    reply = InferenceReply(f"id-{offset}", tenant, "ok", model=model)
    return Letter(StoredRecord(place, died_at_ms, None, b"", found), reply)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(tenant="acme"),
        Selection(model="words"),
        Selection(exception="poison"),
        Selection(exception="inference_consumers.results.records.PoisonError"),
        Selection(request_id="id-5"),
        Selection(since_ms=NOW_MS),
        Selection(until_ms=NOW_MS + 1),
        Selection(offsets=OffsetRange(5, 5)),
        Selection("acme", "words", "Poison", "id-5", NOW_MS, NOW_MS + 1, OffsetRange(0, 9)),
    ],
)
def test_a_letter_is_meant_when_everything_fits(selection: Selection) -> None:
    assert selection.takes(letter())


@pytest.mark.parametrize(
    "selection",
    [
        Selection(tenant="acm"),
        Selection(model="word"),
        Selection(exception="decode"),
        Selection(request_id="id-50"),
        Selection(since_ms=NOW_MS + 1),
        Selection(until_ms=NOW_MS),
        Selection(offsets=OffsetRange(6)),
        Selection(offsets=OffsetRange(0, 4)),
        Selection(tenant="acme", model="other"),
    ],
)
def test_and_not_when_one_thing_does_not(selection: Selection) -> None:
    assert not selection.takes(letter())


@pytest.mark.parametrize(
    ("text", "ago_ms"), [("0s", 0), ("90s", 90_000), ("30m", 1_800_000), ("2h", 2 * HOUR_MS), ("7d", 168 * HOUR_MS)]
)
def test_a_time_may_be_an_age(text: str, ago_ms: int) -> None:
    assert parse_time(text, NOW_MS) == NOW_MS - ago_ms


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00Z", "2026-01-31 12:00", "2026-01-31T13:00:00+01:00", "20260131T120000Z"]
)
def test_a_time_may_be_iso_and_is_utc_without_a_zone(text: str) -> None:
    assert parse_time(text, NOW_MS) == datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp() * 1_000


@pytest.mark.parametrize("text", ["", "yesterday", "2 h", "-2h", "2w", "h", "12:00"])
def test_what_is_no_time_is_told(text: str) -> None:
    with pytest.raises(ValueError, match="neither a time"):
        parse_time(text, NOW_MS)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("12", OffsetRange(12, 12)),
        ("12-40", OffsetRange(12, 40)),
        ("12-12", OffsetRange(12, 12)),
        ("12-", OffsetRange(12, None)),
        ("-40", OffsetRange(0, 40)),
    ],
)
def test_offsets_are_one_or_a_range(text: str, meant: OffsetRange) -> None:
    assert parse_offsets(text) == meant


@pytest.mark.parametrize("text", ["", "-", "x", "1-2-3", "--4", "40-12", "1,2", "9" * 19])
def test_what_is_no_range_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither an offset|before it begins"):
        parse_offsets(text)
