"""The asyncio client without a broker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fairlane.client import AsyncClient, AsyncHandle, RequestFields
from fairlane.errors import AnsweredElsewhere, Backpressure, ClientClosed, Rejected, Timeout
from fairlane.records import InferenceReply
from tests.kit.client_fakes import MODEL_FIELDS, FakeConnector, reply_message

WAIT_S = 10


@asynccontextmanager
async def made_client(
    kafka: FakeConnector, max_in_flight: int = 3, submit_timeout_ms: int = 50
) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        "acme", connector=kafka, max_in_flight=max_in_flight, submit_timeout_ms=submit_timeout_ms, close_timeout_ms=0
    ) as client:
        yield client


async def submit(client: AsyncClient) -> AsyncHandle:
    return await client.submit(model="m", prompt="hello")


def answer(kafka: FakeConnector, handle: AsyncHandle, outcome: str = "ok") -> None:
    kafka.made_consumer.push(reply_message(InferenceReply(handle.request_id, "acme", outcome)))


def test_a_handle_is_awaited_for_its_result() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            handle = await submit(client)
            kafka.made_producer.acknowledge()
            assert await handle.published(WAIT_S) is not None
            assert not handle.done()
            answer(kafka, handle)
            assert (await handle).outcome == "ok"
            assert (await handle.result()).request_id == handle.request_id
            assert handle.done()
            assert repr(handle).startswith("<AsyncHandle ")
            assert (handle.topic, handle.reply_to) == ("requests.acme", "replies.acme")
            assert handle.published_at_ms is not None
            assert handle.received_at_ms is not None
            assert handle.submitted_at_ms <= handle.received_at_ms

    asyncio.run(run())


def test_the_errors_are_those_of_the_sync_client() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka) as client:
            handle = await submit(client)
            for wait in (handle.result, handle.reply, handle.published):
                with pytest.raises(Timeout, match=handle.request_id):
                    await wait(0.01)
            answer(kafka, handle, "rejected")
            with pytest.raises(Rejected):
                await handle
            assert (await handle.reply()).outcome == "rejected"
            with pytest.raises(AnsweredElsewhere):
                await (await client.submit(model="m", prompt="p", reply_to="replies.acme.x"))
            with pytest.raises(ValueError, match=r"^prompt"):
                await client.submit(model="m", prompt="")
            open_one = await submit(client)
            kafka.made_producer.acknowledge(3)
        with pytest.raises(ClientClosed):
            await open_one
        with pytest.raises(ClientClosed):
            await submit(client)

    asyncio.run(run())


def test_a_full_window_holds_tasks_up_and_not_the_loop() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka, max_in_flight=1, submit_timeout_ms=10_000) as client:
            handle = await submit(client)
            cancelled, second, third = [asyncio.create_task(submit(client)) for _ in range(3)]
            await asyncio.sleep(0)  # all three are in line now
            cancelled.cancel()  # its turn passes to the next
            for task in (second, third):
                assert not task.done()
                answer(kafka, handle)
                handle = await asyncio.wait_for(task, WAIT_S)
            answer(kafka, handle)
            await handle.result(WAIT_S)
            assert cancelled.cancelled()
            assert (client.stats.in_flight, client.stats.submitted) == (0, 3)

    asyncio.run(run())


def test_no_room_in_time_is_backpressure() -> None:
    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka, max_in_flight=1) as client:
            handle = await submit(client)
            with pytest.raises(Backpressure, match="limit 1"):
                await submit(client)
            answer(kafka, handle)
            await handle
            await submit(client)

    asyncio.run(run())


def test_submit_many_takes_plain_and_async_iterables() -> None:
    async def endless() -> AsyncIterator[RequestFields]:
        while True:
            yield MODEL_FIELDS

    async def run() -> None:
        kafka = FakeConnector()
        async with made_client(kafka, max_in_flight=10) as client:
            handles = [handle async for handle in client.submit_many([MODEL_FIELDS] * 3)]
            assert len({handle.request_id for handle in handles}) == 3
            async for handle in client.submit_many(endless()):
                handles.append(handle)
                if len(handles) == 6:
                    break
            with pytest.raises(ValueError, match=r"^model") as caught:
                await anext(client.submit_many([{"model": "", "prompt": "p"}]))
            assert caught.value.__notes__ == ["item 0 of submit_many"]
            assert client.stats.submitted == 6

    asyncio.run(run())
