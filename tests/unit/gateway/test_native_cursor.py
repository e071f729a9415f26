"""Cursors: what was made is read again, and nothing else is."""

import base64
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.gateway.native.cursors import MOST_CURSOR_CHARS, Cursors
from producers.gateway.native.routes import cursor_of, place_of
from producers.gateway.results.request_store import EndedCursor, EndedFilter
from producers.openai_api.errors import GatewayError

_INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=128)
places = st.builds(EndedCursor, _INT64, _TEXT, _TEXT, _INT64, _INT64)
filters = st.builds(
    EndedFilter, st.none() | _TEXT, st.none() | _TEXT, st.none() | st.integers(0), st.none() | st.integers(0)
)
PLACE, ANY = EndedCursor(1, "id", "requests.acme", 0, 7), EndedFilter()


@given(places, filters)
def test_a_cursor_comes_back_as_the_place_it_was_made_of(place: EndedCursor, wanted: EndedFilter) -> None:
    cursor = cursor_of("acme", wanted, place)
    assert place_of("acme", wanted, cursor) == place
    assert len(cursor) <= MOST_CURSOR_CHARS
    assert cursor.isascii()


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_anything_else_is_refused(text: str) -> None:
    refused(text)


@given(st.data())
def test_a_cursor_that_was_changed_never_breaks_anything(data: st.DataObject) -> None:
    cursor = cursor_of("acme", ANY, PLACE)
    at = data.draw(st.integers(0, len(cursor) - 1))
    changed = cursor[:at] + data.draw(st.characters(codec="ascii")) + cursor[at + 1 :]
    with suppress(GatewayError):
        place = place_of("acme", ANY, changed)
        assert place is not None
        # Then it names another place, of the same caller's.
        assert "\0" not in place.request_id + place.source_topic


@pytest.mark.parametrize(
    ("tenant", "wanted"),
    [
        ("globex", ANY),
        ("acme", EndedFilter(outcome="failed")),
        ("acme", EndedFilter(model="m")),
        ("acme", EndedFilter(since_ms=1)),
    ],
)
def test_a_cursor_counts_for_its_own_query_alone(tenant: str, wanted: EndedFilter) -> None:
    with pytest.raises(GatewayError, match="another query"):
        place_of(tenant, wanted, cursor_of("acme", ANY, PLACE))


@pytest.mark.parametrize(
    "place",
    [
        [2**63, "id", "t", 0, 0],
        [0, "i\0d", "t", 0, 0],
        [0, "id", "t", 0, -(2**64)],
        [0, "id", "t", 0],
        [0, "id", "t", 0, "0"],
    ],
)
def test_what_no_row_can_have_is_refused(place: list[object]) -> None:
    known = base64.urlsafe_b64decode(cursor_of("acme", ANY, PLACE) + "===")
    digest = msgspec.msgpack.decode(known)[0]
    names = ("replied_at_ms", "request_id", "source_topic", "source_partition", "source_offset")
    try:
        raw = msgspec.msgpack.encode([digest, dict(zip(names, place, strict=False))])
    except OverflowError:
        raw = b"\x93"
    refused(base64.urlsafe_b64encode(raw).decode())


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (str, "a\0b"),
        (int, 2**63),
        (int, -(2**63)),
        (tuple[str, str], ("acme", "u\0")),
        (tuple[int, str], (2**64 - 1, "x")),
    ],
)
def test_what_postgres_cannot_hold_is_no_place_of_any_kind(kind: type, place: object) -> None:
    made: Cursors[object] = Cursors(kind)
    with pytest.raises(GatewayError) as caught:
        made.decode("acme", made.encode("acme", place))
    assert (caught.value.status, caught.value.field) == (400, "cursor")
    assert made.decode("acme", None) is None


def refused(text: str) -> None:
    with pytest.raises(GatewayError) as caught:
        place_of("acme", ANY, text)
    assert (caught.value.status, caught.value.field) == (400, "cursor")
