"""Events of a stream, whatever the parts in which it comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.engines.remote.event_stream import EventStream, EventStreamError

STREAM = b"".join(
    (
        b': a comment\r\n\r\ndata: {"a": 1}\n\n',
        b"event: message\nid: 7\ndata:two\r\ndata: lines\r\n\r\n\n\n",
        b"data: [DONE]\n\ndata",
    )
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20).map(sorted))
def test_events_are_the_same_in_any_parts(cuts: list[int]) -> None:
    stream = EventStream(1_000)
    found: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        found += stream.feed(STREAM[start:end])
    assert found == EVENTS


@pytest.mark.parametrize("endless", [b"x" * 10, b"data: 12345\n"])
def test_an_event_without_end_is_refused(endless: bytes) -> None:
    stream = EventStream(100)
    for _ in range(100 // len(endless)):
        assert list(stream.feed(endless)) == []
    with pytest.raises(EventStreamError, match="an event is longer than 100 bytes"):
        list(stream.feed(endless * 20))


@pytest.mark.timeout(15)
def test_a_long_event_in_tiny_parts_takes_time_in_proportion_to_its_length() -> None:
    """A byte at a time: copied with each part, they would be 137 GB."""
    stream = EventStream(4 << 20)
    for _ in range(1 << 19):
        assert not list(stream.feed(b"x"))
    assert list(stream.feed(b"\ndata: y\n\n")) == [b"y"]
