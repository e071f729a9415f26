"""Conversations of the client without a broker: each turn is sent after the last one that was answered."""

import asyncio
from typing import Any

import pytest

from fairlane.client import AsyncClient, Client
from fairlane.errors import Rejected, Timeout
from fairlane.records import ConversationTurn, InferenceReply, InferenceRequest, Message, Output
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConnector, reply_message
from tests.kit.waiting import eventually, eventually_async

WAIT_S = 10


def sent(kafka: FakeConnector) -> list[InferenceRequest]:
    records = [default_codec().decode(one.value) for one in kafka.made_producer.sent]
    return [record for record in records if isinstance(record, InferenceRequest)]


def answer(kafka: FakeConnector, request_id: str, outcome: str = "ok") -> None:
    """What is answered is a turn."""
    output, turn = None, None
    if outcome == "ok":
        output, turn = Output(text="so it is"), ConversationTurn("any", ())
    kafka.made_consumer.push(reply_message(InferenceReply(request_id, "acme", outcome, output=output, turn=turn)))


def test_each_turn_comes_after_the_last_one_that_was_answered(client: Client, kafka: FakeConnector) -> None:
    talk = client.conversation(model="m", system="Be brief.", max_tokens=5)
    first = talk.submit("one")
    second = talk.submit("two")
    answer(kafka, first.request_id)
    assert first.result(WAIT_S).outcome == "ok"
    answer(kafka, second.request_id, "rejected")
    with pytest.raises(Rejected):
        second.result(WAIT_S)
    third = talk.submit("three")
    assert [(one.conversation_id, one.conversation_after) for one in sent(kafka)] == [
        (talk.conversation_id, None),
        (talk.conversation_id, None),
        (talk.conversation_id, first.request_id),
    ]
    assert sent(kafka)[2].input.messages == (Message("system", "Be brief."), Message("user", "three"))
    assert sent(kafka)[2].parameters.max_tokens == 5
    assert third.request_id == sent(kafka)[2].request_id


def test_one_that_is_answered_after_its_timeout_is_part_of_it(client: Client, kafka: FakeConnector) -> None:
    talk = client.conversation(model="m", conversation_id="orders-17")
    with pytest.raises(Timeout):
        talk.ask("one", timeout=0)
    (request,) = sent(kafka)
    assert (talk.conversation_id, talk.after) == ("orders-17", None)
    answer(kafka, request.request_id)
    eventually(lambda: talk.after == request.request_id)


def test_a_stream_is_a_turn_as_well(client: Client, kafka: FakeConnector) -> None:
    talk = client.conversation(model="m")
    with talk.stream("one", timeout=WAIT_S) as stream:
        answer(kafka, stream.request_id)
        assert "".join(delta.text for delta in stream) == "so it is"
    assert talk.after == stream.request_id
    assert sent(kafka)[0].parameters.stream


def test_a_conversation_goes_on_elsewhere(client: Client, kafka: FakeConnector) -> None:
    begun = client.conversation(model="m")
    answered = begun.submit("one")
    answer(kafka, answered.request_id)
    answered.result(WAIT_S)
    later = client.conversation(
        model="m", conversation_id=begun.conversation_id, conversation_after=begun.after, cache="exact"
    )
    later.submit("two")
    assert sent(kafka)[1].conversation_after == answered.request_id
    assert sent(kafka)[1].cache == "exact"


@pytest.mark.parametrize(
    ("fields", "named"), [({"prompt": "p"}, "prompt"), ({"messages": []}, "messages"), ({"stream": True}, "stream")]
)
def test_what_each_turn_brings_is_not_given_for_all(client: Client, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        client.conversation(model="m", **fields)


def test_with_asyncio(kafka: FakeConnector) -> None:
    async def run() -> None:
        async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
            talk = client.conversation(model="m")
            first = asyncio.ensure_future(talk.ask("one", timeout=WAIT_S))
            await eventually_async(lambda: client._core.started and sent(kafka))
            answer(kafka, sent(kafka)[0].request_id)
            assert (await first).outcome == "ok"
            assert talk.after == sent(kafka)[0].request_id
            async with talk.stream("two", timeout=WAIT_S) as stream:
                answer(kafka, stream.request_id)
                assert "".join([delta.text async for delta in stream]) == "so it is"
            assert talk.after == stream.request_id
            assert sent(kafka)[1].conversation_after == sent(kafka)[0].request_id

    asyncio.run(run())
