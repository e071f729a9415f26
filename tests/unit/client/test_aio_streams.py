"""Streams of text for asyncio, without a broker."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fairlane.client import AsyncClient, AsyncTextStream, TextDelta
from fairlane.errors import PublishFailed, Rejected, Timeout
from tests.kit.client_fakes import FakeConnector
from tests.kit.stream_replies import answer, cancelled, chunk
from tests.kit.waiting import eventually

WAIT_S = 10


@asynccontextmanager
async def made_client(kafka: FakeConnector) -> AsyncIterator[AsyncClient]:
    async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
        yield client


def stream(client: AsyncClient, timeout: float | None = WAIT_S) -> AsyncTextStream:
    return client.stream(model="m", prompt="hello", timeout=timeout)


def test_text_comes_as_it_is_made_and_the_reply_ends_it() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            made = stream(client)
            assert (kafka.made_producer.sent, made.text) == ([], "")
            async with made:
                assert kafka.chunk_readers == len(kafka.made_producer.sent) == 1
                chunk(kafka, made.request_id, 0, "Par")
                assert await anext(made) == TextDelta("Par")
                chunk(kafka, made.request_id, 0, "Rom", attempt=2)
                assert await anext(made) == TextDelta("Rom", restarted=True, attempt=2)
                answer(kafka, made.request_id, "Rome")
                assert [delta async for delta in made] == [TextDelta("e", attempt=2)]
                assert (made.text, (await made.reply()).outcome) == ("Rome", "ok")
            assert [delta async for delta in made] == []
            assert cancelled(kafka) == []

    asyncio.run(run())


def test_a_stream_begins_with_whatever_is_asked_first() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            iterated, asked = stream(client), stream(client)
            tasks = [asyncio.create_task(coroutine) for coroutine in (asked.reply(WAIT_S), asked.reply(WAIT_S))]
            first = asyncio.ensure_future(anext(iterated))
            await asyncio.to_thread(eventually, lambda: len(kafka.made_producer.sent) == 2)
            for one in (iterated, asked):
                answer(kafka, one.request_id, "Rome")
            assert await first == TextDelta("Rome")
            assert [(await task).outcome for task in tasks] == ["ok", "ok"]
            assert len(kafka.made_producer.sent) == 2, "asked twice is sent once"

    asyncio.run(run())


def test_the_errors_are_those_of_the_sync_stream() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            with pytest.raises(ValueError, match=r"^task: "):
                client.stream(model="m", task="embed", texts=["a"])
            with pytest.raises(ValueError, match=r"^prompt: "):
                await anext(client.stream(model="m", prompt=""))
            made = stream(client, timeout=0.01)
            with pytest.raises(Timeout, match=made.request_id):
                await anext(made)
            answer(kafka, made.request_id, None, "rejected")
            await made.reply(WAIT_S)
            with pytest.raises(Rejected):
                await anext(made)
            assert cancelled(kafka) == []
            unsent = stream(client)
            await unsent.close()
            assert [delta async for delta in unsent] == []
            with pytest.raises(ValueError, match="closed before anything was sent"):
                await unsent.reply()
            kafka.made_producer.refuse_with = BufferError()
            with pytest.raises(Exception, match="queue is full"):
                await anext(stream(client))
            assert client._core.chunks._answers == {}

    asyncio.run(run())


def test_closing_a_stream_cancels_its_request_and_ends_who_waits() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            async with stream(client) as made:
                waiting = asyncio.ensure_future(anext(made, None))
                await asyncio.sleep(0)
            assert cancelled(kafka) == [made.request_id]
            assert await waiting is None
            answer(kafka, made.request_id, None, "cancelled")
            assert (await made.reply(WAIT_S)).outcome == "cancelled"

    asyncio.run(run())


def test_a_task_that_is_cancelled_cancels_its_request() -> None:
    async def read(made: AsyncTextStream) -> list[TextDelta]:
        return [delta async for delta in made]

    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            made = stream(client)
            task = asyncio.create_task(read(made))
            await asyncio.to_thread(eventually, lambda: made._answer)
            chunk(kafka, made.request_id, 0, "Par")
            await asyncio.to_thread(eventually, lambda: made.text == "Par")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cancelled(kafka) == [made.request_id]
            assert [delta async for delta in made] == []

    asyncio.run(run())


def test_a_stream_that_is_closed_while_it_is_opened_is_cancelled() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            made = stream(client)
            opening = asyncio.ensure_future(anext(made, None))
            while not made._opening.locked():
                await asyncio.sleep(0)
            await made.close()
            assert await opening is None
            assert cancelled(kafka) == [made.request_id]

    asyncio.run(run())


def test_dropping_a_stream_cancels_its_request() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            async with stream(client):
                pass  # chunks are read from now on, so the next one is opened without a thread
            made = stream(client)
            request_id = made.request_id
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made.reply(), 0.05)
            del made
            gc.collect()
            await asyncio.to_thread(eventually, lambda: request_id in cancelled(kafka))

    asyncio.run(run())


def test_a_stream_may_outlive_its_loop() -> None:
    kafka = FakeConnector()
    client = AsyncClient("acme", connector=kafka, close_timeout_ms=0)
    made = stream(client)

    async def begin() -> None:
        async with asyncio.timeout(WAIT_S):
            await made._open()

    asyncio.run(begin())
    chunk(kafka, made.request_id, 0, "Par")
    eventually(lambda: made._answer and made._answer._text._pending)
    asyncio.run(client.close())
    with pytest.raises(PublishFailed):
        asyncio.run(made.reply())
