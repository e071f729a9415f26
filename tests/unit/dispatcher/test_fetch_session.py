"""Fetch sessions: broker and reader agree on what is fetched, and the bytes are those of the protocol."""

import io
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.fetch import FetchRequest_v11, FetchResponse_v11
from aiokafka.structs import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.reading.fetch_session import FetchRequest, FetchResponse, FetchSession, SessionChange

TPS = [TopicPartition(f"requests.{name}", number) for name in ("a", "b", "ü") for number in range(3)]

offsets = st.dictionaries(st.sampled_from(TPS), st.integers(0, 2**63 - 1))


class Broker:
    """A broker's fetch sessions, by the rules of KIP-227."""

    def __init__(self) -> None:
        self.sessions: dict[int, dict[TopicPartition, int]] = {}
        self.epochs: dict[int, int] = {}
        self.made = 0

    def fetched(self, change: SessionChange, *, has_room: bool) -> tuple[dict[TopicPartition, int] | None, int]:
        """The offsets fetched, None for an error, and the session id of the response."""
        if change.epoch == 0:
            self.sessions.pop(change.session_id, None)
            assert not change.forgotten
            if not has_room:
                return dict(change.changed), 0
            self.made += 1
            self.sessions[self.made], self.epochs[self.made] = dict(change.changed), 1
            return self.sessions[self.made], self.made
        session = self.sessions.get(change.session_id)
        if session is None or self.epochs[change.session_id] != change.epoch:
            return None, 0
        self.epochs[change.session_id] += 1
        for tp in change.forgotten:
            del session[tp]
        session.update(change.changed)
        return session, change.session_id


@given(
    st.lists(
        st.tuples(offsets, st.sampled_from(["answered", "lost before", "lost behind", "evicted", "no room"])),
        min_size=1,
        max_size=12,
    )
)
def test_the_broker_fetches_exactly_what_is_wanted(steps: list[tuple[dict[TopicPartition, int], str]]) -> None:
    session, broker = FetchSession(), Broker()
    for wanted, event in steps:
        change = session.next_request(wanted)
        assert session.asked == wanted
        if event == "lost before":
            session.end()
            continue
        if event == "evicted":
            broker.sessions.clear()
        fetched, session_id = broker.fetched(change, has_room=event != "no room")
        if event == "lost behind":
            session.end()
        elif fetched is None:
            assert event == "evicted"
            session.end()
        else:
            assert fetched == wanted
            session.answered(session_id)
    # One more without a fault: whatever happened, they agree again.
    fetched, _ = broker.fetched(session.next_request({TPS[0]: 3}), has_room=True)
    assert fetched is None or fetched == {TPS[0]: 3}


def test_a_request_repeats_nothing_that_the_broker_knows() -> None:
    session = FetchSession()
    assert session.next_request({TPS[0]: 1, TPS[1]: 5}) == (0, 0, {TPS[0]: 1, TPS[1]: 5}, ())
    session.answered(9)
    assert session.next_request({TPS[0]: 2, TPS[1]: 5}) == (9, 1, {TPS[0]: 2}, [])
    session.answered(9)
    assert session.next_request({TPS[1]: 5}) == (9, 2, {}, [TPS[0]])


@given(offsets, st.lists(st.sampled_from(TPS), unique=True), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_request_is_encoded_as_the_protocol_says(
    changed: dict[TopicPartition, int], forgotten: list[TopicPartition], session_id: int, epoch: int
) -> None:
    request = FetchRequest(SessionChange(session_id, epoch, changed, forgotten), 200, 16_000_000, 1_000_000, 1)
    decoded = FetchRequest_v11.decode(request.encode())
    assert (decoded.replica_id, decoded.max_wait_time, decoded.min_bytes) == (-1, 200, 1)
    assert (decoded.max_bytes, decoded.isolation_level, decoded.rack_id) == (16_000_000, 1, "")
    assert (decoded.session_id, decoded.session_epoch) == (session_id, epoch)
    assert {
        TopicPartition(topic, number): offset
        for topic, asked in decoded.topics
        for number, leader_epoch, offset, log_start, most_bytes in asked
        if (leader_epoch, log_start, most_bytes) == (-1, -1, 1_000_000)
    } == changed
    said = [TopicPartition(topic, number) for topic, numbers in decoded.forgotten_topics_data for number in numbers]
    assert sorted(said) == sorted(forgotten)


answers = st.tuples(
    st.integers(0, 2**31 - 1),
    st.integers(-1, 100),
    st.integers(-1, 2**63 - 1),
    st.integers(-1, 2**63 - 1),
    st.integers(-1, 2**63 - 1),
    st.one_of(st.none(), st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=3)),
    st.integers(-1, 5),
    st.one_of(st.none(), st.binary(max_size=50)),
)


@given(
    st.integers(-1, 100),
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(st.sampled_from(["requests.a", "ü"]), st.lists(answers, max_size=3)), max_size=3),
)
def test_a_response_is_decoded_as_the_protocol_says(error_code: int, session_id: int, topics: list[Any]) -> None:
    body = io.BytesIO(b"head" + FetchResponse_v11(0, error_code, session_id, topics).encode())
    body.seek(4)
    decoded = FetchResponse.decode(body)
    assert (decoded.error_code, decoded.session_id) == (error_code, session_id)
    assert [tuple(answer) for answer in decoded.answers] == [
        (TopicPartition(topic, number), error, high, stable, aborted or [], records or b"")
        for topic, asked in topics
        for number, error, high, stable, _, aborted, _, records in asked
    ]


def test_a_broker_without_sessions_is_refused() -> None:
    request = FetchRequest(SessionChange(0, 0, {}, ()), 200, 1, 1, 1)
    assert request.prepare({1: (4, 17)}) is request
    for versions in ({1: (0, 10)}, {}):
        with pytest.raises(IncompatibleBrokerVersion, match="needed is 11"):
            request.prepare(versions)
