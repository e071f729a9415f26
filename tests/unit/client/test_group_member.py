"""A stream of replies against a broker that stops answering."""

import threading
from contextlib import nullcontext

import pytest
from confluent_kafka import KafkaError

from fairlane.client import group_member
from fairlane.client.group_member import GroupMember, OnUndecodable, SerialExecutor, UndecodableReply
from fairlane.errors import Unavailable
from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from tests.kit.client_fakes import FakeMember, error_message, reply_message
from tests.kit.waiting import eventually


@pytest.fixture
def consumer() -> FakeMember:
    return FakeMember()


@pytest.fixture
def member(consumer: FakeMember) -> GroupMember:
    return made_member(consumer)


@pytest.fixture
def hasty_member(consumer: FakeMember, monkeypatch: pytest.MonkeyPatch) -> GroupMember:
    """It waits for hardly anything."""
    monkeypatch.setattr(group_member, "_COMMIT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(group_member, "_CLOSE_TIMEOUT_S", 0.05)
    return made_member(consumer)


def made_member(consumer: FakeMember, on_undecodable: OnUndecodable | None = None) -> GroupMember:
    return GroupMember(
        consumer,
        "replies.acme",
        default_codec(),
        from_beginning=True,
        on_undecodable=on_undecodable,
        idle_timeout_s=0.5,
        start_timeout_s=1.0,
    )


def push(consumer: FakeMember) -> None:
    consumer.push(reply_message(InferenceReply("1", "acme", "ok")))  # at offset 7


def test_only_what_is_done_is_committed_at_the_close(member: GroupMember, consumer: FakeMember) -> None:
    push(consumer)
    assert member.next() is not None
    member.close()
    assert consumer.commits == [[(0, 0)]]
    assert consumer.closed


def test_an_ack_is_committed_before_it_returns(member: GroupMember, consumer: FakeMember) -> None:
    push(consumer)
    member.next()
    member.ack()
    assert consumer.commits == [[(0, 8)]]


def test_asking_for_the_next_one_is_an_ack(member: GroupMember, consumer: FakeMember) -> None:
    push(consumer)
    member.next()
    assert member.next() is None  # idle
    assert consumer.commits == [[(0, 8)]]


def test_a_broker_that_does_not_answer_holds_up_neither_ack_nor_close(
    hasty_member: GroupMember, consumer: FakeMember
) -> None:
    push(consumer)
    hasty_member.next()
    consumer.answers.clear()
    with pytest.raises(Unavailable, match="no answer within"):
        hasty_member.ack()
    hasty_member.close()
    assert not consumer.closed, "a consumer is never closed under a call that is still in it"
    consumer.answers.set()
    eventually(lambda: consumer.closed)
    assert hasty_member.next() is None


def test_a_refused_commit_is_said_by_ack_and_not_fatal_to_close(member: GroupMember, consumer: FakeMember) -> None:
    push(consumer)
    member.next()
    consumer.commit_error = KafkaError(KafkaError.ILLEGAL_GENERATION, "not a member")
    with pytest.raises(Unavailable, match="not committed: not a member"):
        member.ack()
    member.close()
    assert consumer.closed


def test_a_lost_head_of_the_log_is_said_and_reading_goes_on(
    member: GroupMember, consumer: FakeMember, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.push(error_message(KafkaError._AUTO_OFFSET_RESET))
    push(consumer)
    assert member.next() is not None
    assert len(consumer.sought) == 1
    assert "replies_lost" in caplog.text


@pytest.mark.parametrize("is_taken", [False, True])
def test_what_is_no_reply_is_done_when_it_was_reported_and_not_when_that_failed(
    consumer: FakeMember, is_taken: bool
) -> None:
    reported: list[bytes | None] = []

    def report(bad: UndecodableReply) -> None:
        reported.append(bad.value)
        if not is_taken:
            raise LookupError("nowhere to put it")

    member = made_member(consumer, report)
    broken = reply_message(InferenceReply("1", "acme", "ok"))
    broken.set_value(b"no reply")
    consumer.push(broken)
    with nullcontext() if is_taken else pytest.raises(LookupError):
        assert member.next() is None  # idle
    member.ack()
    member.close()
    assert (reported, member.undecodable) == ([b"no reply"], 1)
    assert consumer.commits[-1] == [(0, 8 if is_taken else 0)]


def test_a_record_whose_schema_cannot_be_had_is_not_done(
    member: GroupMember, consumer: FakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away:
        def decode_as(self, *_: object) -> None:
            raise RegistryError("nobody answers")

    monkeypatch.setattr(member, "_codec", Away())
    push(consumer)
    with pytest.raises(Unavailable, match="nobody answers"):
        member.next()
    assert member.next() is None
    member.ack()
    member.close()
    assert (consumer.commits[-1], member.undecodable) == ([(0, 0)], 0)


def test_a_permanent_error_ends_the_iteration(member: GroupMember, consumer: FakeMember) -> None:
    consumer.push(error_message(KafkaError.GROUP_AUTHORIZATION_FAILED))
    with pytest.raises(Unavailable, match="says the broker"):
        member.next()


def test_a_partition_that_is_taken_away_at_once_is_not_begun(member: GroupMember, consumer: FakeMember) -> None:
    consumer.rebalances.append("on_revoke")
    push(consumer)
    assert member.next() is None  # idle
    assert (consumer.assigned, consumer.asked) == ([], 0)
    consumer.rebalances.append("on_assign")
    assert member.next() is not None
    assert [start.offset for start in consumer.assigned] == [0]


def test_a_group_that_does_not_say_where_it_left_off_ends_the_iteration(
    member: GroupMember, consumer: FakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_member, "_ASSIGN_TIMEOUT_S", 0.0)
    consumer.positions_error = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    push(consumer)
    with pytest.raises(Unavailable, match="where the group left off is not known"):
        member.next()
    assert member.next() is None
    assert consumer.assigned == []


def test_blocking_calls_are_made_one_after_the_other() -> None:
    sequence = SerialExecutor()
    gate = threading.Event()
    order: list[int] = []

    def first() -> None:
        gate.wait(30)
        order.append(1)

    with pytest.raises(TimeoutError):
        sequence.call(first, 0.01)
    with pytest.raises(TimeoutError):
        sequence.call(lambda: order.append(2), 0.01)
    gate.set()
    assert sequence.call(lambda: len(order), 10) == 2
    assert order == [1, 2]
    with pytest.raises(LookupError, match="from the call"):
        sequence.call(_raise, 10)


def _raise() -> None:
    raise LookupError("from the call")
