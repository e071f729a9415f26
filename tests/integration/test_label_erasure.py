"""Erasures reach label items and feedback that repeat what was said in other turns of a conversation."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fairlane.guardrail_records import GuardrailVerdict
from fairlane.records import ConversationTurn, Message
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from tests.kit.label_kit import QUESTION, LabelBench, request_id
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.full]

SAID = (Message("user", "I am Zebrafinch."), Message("assistant", "Hello."))
TURN = ConversationTurn("talk", (QUESTION,))
BLOCKED: dict[str, Any] = {
    "outcome": "failed",
    "code": "guardrail_blocked",
    "output": None,
    "guardrails": (GuardrailVerdict("output", "pii", "blocked", ("email",)),),
}


@pytest.fixture
def bench(migrated: PostgresServer) -> Iterator[LabelBench]:
    made = LabelBench(migrated)
    made.allow("acme")
    yield made
    made.close()


def in_talk(bench: LabelBench, *numbers: int, conversation: str = "talk", later: bool = True) -> None:
    """The work of these was a turn of a conversation; a later one was given what was said before."""
    for number in numbers:
        bench.works.asked[number] = {"conversation_id": conversation}
        if later:
            bench.works.fields[number] = {"history": SAID}


def feedback(bench: LabelBench) -> list[int]:
    return [int(one[-12:]) for (one,) in bench.tables.rows("SELECT request_id FROM feedback ORDER BY 1")]


def test_an_erased_turn_takes_the_items_of_later_turns_that_repeat_it(bench: LabelBench) -> None:
    in_talk(bench, 1, later=False)
    in_talk(bench, 2, 3)
    in_talk(bench, 4, conversation="other")
    bench.answered(1, 2, 3, turn=TURN)
    bench.answered(4, turn=replace(TURN, conversation_id="other"))
    bench.rated(1, 2, 4)
    bench.collector.look()
    assert bench.queued() == [1, 2, 4]
    bench.erase(ErasureKind.REQUESTS, request_id(1))
    assert bench.queued() == [4]
    # Neither comes back, and no other turn that was answered with the erased one before it comes in.
    bench.rated(3)
    bench.collector.look()
    assert bench.queued() == [4]
    assert feedback(bench) == [2, 3, 4], "what was said of other turns is about them"


def test_an_erased_turn_leaves_the_item_that_does_not_repeat_it(bench: LabelBench) -> None:
    in_talk(bench, 1, later=False)
    in_talk(bench, 2)
    bench.answered(1, 2, turn=TURN)
    bench.rated(1, 2)
    bench.collector.look()
    bench.erase(ErasureKind.REQUESTS, request_id(2))
    bench.collector.look()
    assert bench.queued() == [1]


def test_an_item_is_not_queued_while_a_turn_before_it_is_being_erased(bench: LabelBench) -> None:
    in_talk(bench, 2)
    bench.answered(1, 2, turn=TURN)
    bench.rated(2)
    with Erasures(bench.server.gateway_dsn, "acme", kept_ms=86_400_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [request_id(1)], "key:1")
    bench.collector.look()
    assert bench.queued() == []


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_erased_conversation_takes_a_blocked_request_which_left_no_turn(
    bench: LabelBench, *, is_queued: bool
) -> None:
    in_talk(bench, 1, 2)
    bench.answered(1, turn=TURN)
    bench.answered(2, **BLOCKED)
    bench.rated(2, comment="about Zebrafinch")
    if is_queued:
        bench.collector.look()
        assert bench.queued() == [2]
    bench.erase(ErasureKind.CONVERSATION, "talk")
    bench.collector.look()
    assert bench.queued() == []
    # Without an item nothing that is stored says of which conversation it was; it expires.
    assert feedback(bench) == ([] if is_queued else [2])
    assert bench.tables.rows("SELECT request_id FROM results") == ([] if is_queued else [(request_id(2),)])


def test_an_erased_conversation_takes_items_and_feedback_whose_turns_have_expired(bench: LabelBench) -> None:
    in_talk(bench, 1, 2)
    bench.answered(1, 2, turn=TURN)
    bench.rated(1)
    bench.rated(2, thumb="up", comment="thank you, Zebrafinch")
    bench.collector.look()
    assert (bench.queued(), feedback(bench)) == ([1], [1, 2])
    bench.as_owner("DELETE FROM conversation_turns")
    bench.erase(ErasureKind.CONVERSATION, "talk")
    assert (bench.queued(), feedback(bench)) == ([], [])
    bench.collector.look()
    assert bench.queued() == []
    assert bench.tables.rows("SELECT kind FROM erased ORDER BY kind") == [("conversation",), ("request",), ("request",)]


def test_an_erased_request_takes_items_of_its_conversation_whose_turns_have_expired(bench: LabelBench) -> None:
    in_talk(bench, 1, 2)
    bench.answered(1, 2, turn=TURN)
    bench.rated(1, thumb="up")
    bench.rated(2)
    bench.collector.look()
    bench.as_owner("DELETE FROM conversation_turns")
    bench.erase(ErasureKind.REQUESTS, request_id(1))
    bench.collector.look()
    assert bench.queued() == []


def test_the_replay_of_an_erased_request_is_not_queued(bench: LabelBench) -> None:
    bench.works.asked[2] = {"replay_of": request_id(1)}
    bench.answered(2)
    bench.rated(2)
    with Erasures(bench.server.gateway_dsn, "acme", kept_ms=86_400_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [request_id(1)], "key:1")
    bench.collector.look()
    assert bench.queued() == []
