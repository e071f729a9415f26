"""The load generator's own client, against servers that answer in every way, and what it makes of their answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.replay.calls import CONNECTION, CallOutcome, ChatStreamParser, of_body
from producers.replay.http_client import HttpClient, HttpError
from producers.replay.targets import GatewayTarget
from producers.replay.trace import Call

Answerer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_USAGE = {"prompt_tokens": 5, "completion_tokens": 7}
_SERVED = CallOutcome("ok", degraded=True, prompt_tokens=5, output_tokens=7)
_CALL = Call(3, 0.0, "acme", 4, 2)


@asynccontextmanager
async def server(answer: Answerer) -> AsyncIterator[str]:
    """A server whose every connection is given to ``answer``. Yields its address."""
    under_way: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way.add(task)
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            under_way.discard(task)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def request_of(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The head and the body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    [length] = [int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length:")]
    return head, await reader.readexactly(length)


def whole(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


def test_connections_are_kept_and_used_again() -> None:
    async def run() -> None:
        connections = 0
        heads: list[str] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            while True:
                head, body = await request_of(reader)
                heads.append(head)
                # In two pieces, of which the first ends within the head.
                answered = whole(body, more="X-One: 1\r\n")
                writer.write(answered[:10])
                await writer.drain()
                writer.write(answered[10:])

        async with server(answer) as url:
            client = HttpClient(f"{url}/base/")
            for text in (b"one", b"two"):
                reply = await client.send(client.request("POST", "/x", {"A": "b"}, text))
                assert (reply.status, reply.body) == (200, text)
            at_once = [client.send(client.request("POST", "/x", {}, b"%d" % number)) for number in range(5)]
            assert [reply.body for reply in await asyncio.gather(*at_once)] == [b"0", b"1", b"2", b"3", b"4"]
            client.close()
        assert 1 <= connections <= 5
        assert heads[0].startswith("POST /base/x HTTP/1.1\r\n")
        assert "A: b" in heads[0]

    asyncio.run(run())


def test_a_connection_that_the_server_ends_is_not_used_again() -> None:
    async def run() -> None:
        connections = 0

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            await request_of(reader)
            writer.write(whole(b"{}", more="Connection: close\r\n"))
            await writer.drain()

        async with server(answer) as url:
            client = HttpClient(url)
            for _ in range(3):
                assert (await client.send(client.request("GET", "/", {}))).status == 200
            client.close()
        assert connections == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    "answered", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", b"SSH-2.0-OpenSSH\r\n"], ids=str
)
def test_what_is_no_whole_answer_is_an_error(answered: bytes) -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            writer.write(answered)
            await writer.drain()

        async with server(answer) as url:
            client = HttpClient(url)
            with pytest.raises(HttpError):
                await client.send(client.request("GET", "/", {}))
            target = GatewayTarget(url, {"acme": "k"}, "m", stream=False)
            assert await target.ask(_CALL, 5, lambda: None) == CallOutcome(CONNECTION)
            await target.close()

    asyncio.run(run())


def test_nobody_there_is_an_error() -> None:
    async def run() -> None:
        async with server(lambda _reader, _writer: asyncio.sleep(0)) as url:
            pass
        client = HttpClient(url)
        with pytest.raises(HttpError, match="no connection"):
            await client.send(client.request("GET", "/", {}))

    asyncio.run(run())


def test_whoever_leaves_closes_the_connection() -> None:
    async def run() -> None:
        asked, closed = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
            await request_of(reader)
            asked.set()
            try:
                assert await reader.read() == b""
            finally:
                closed.set()

        async with server(answer) as url:
            client = HttpClient(url)
            call = asyncio.create_task(client.send(client.request("GET", "/", {})))
            await asyncio.wait_for(asked.wait(), 30)
            call.cancel()
            await asyncio.wait_for(closed.wait(), 30)
            assert call.cancelled() or call.cancelling()
            client.close()

    asyncio.run(run())


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:80", "http://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        HttpClient(url)


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown() -> None:
    with pytest.raises(ValueError, match="key of acme") as caught:
        GatewayTarget("http://127.0.0.1", {"acme": "secret\r\nHost: other"}, "m", stream=False)
    assert "secret" not in str(caught.value)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str | None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


_STREAM = (
    b": a comment\n\n"
    + event(**text(None))
    + event(**text("one\nline"))
    + event(**text(" two"))
    + event(choices=[], usage=_USAGE, fairlane={"degradations": ["capped_max_tokens"]})
    + b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(_STREAM)), max_size=12))
def test_a_stream_is_read_whatever_pieces_it_comes_in(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(_STREAM)]
    first: list[int] = []
    fed = 0
    stream = ChatStreamParser(lambda: first.append(fed))
    for start, end in pairwise(places):
        fed = end
        stream.feed(_STREAM[start:end])

    assert stream.outcome(200) == _SERVED
    [at] = first
    assert at >= _STREAM.index(b"one")


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, _STREAM.removesuffix(b"data: [DONE]\n\n"), CallOutcome("unreadable")),
        (200, b"data: {no json}\n\ndata: [DONE]\n\n", CallOutcome("unreadable")),
        (200, event(error={"code": "expired"}) + b"data: [DONE]\n\n", CallOutcome("expired")),
        (200, event(error={"code": "overloaded"}), CallOutcome("overloaded", shed=True)),
        (200, b"", CallOutcome("unreadable")),
        (429, b'{"error": {"code": "overloaded"}}', CallOutcome("overloaded", shed=True)),
        (500, b"oops", CallOutcome("http_500")),
    ],
    ids=str,
)
def test_a_stream_that_went_wrong_says_how(status: int, body: bytes, expected: CallOutcome) -> None:
    stream = ChatStreamParser(lambda: None)
    stream.feed(body)

    assert stream.outcome(status) == expected


def test_an_answer_in_one_piece_is_read() -> None:
    served = json.dumps({"usage": _USAGE, "fairlane": {"degradations": ["x"]}}).encode()

    assert of_body(200, served) == _SERVED
    assert of_body(200, b"[]") == CallOutcome("unreadable")
    assert of_body(200, b"{}") == CallOutcome("ok")
    assert of_body(503, b'{"error": {"code": null}}') == CallOutcome("http_503", shed=True)
    assert of_body(502, b"<html>") == CallOutcome("http_502")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_says_who_asks_what_and_until_when(*, stream: bool) -> None:
    async def run() -> None:
        asked: list[tuple[str, bytes]] = []
        first: list[None] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await request_of(reader))
            if stream:
                chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_STREAM), _STREAM)
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
            else:
                writer.write(whole(json.dumps({"usage": _USAGE, "fairlane": {"degradations": ["x"]}}).encode()))
            await writer.drain()

        async with server(answer) as url:
            target = GatewayTarget(url, {"acme": "k1", "globex": "k2"}, "m", stream=stream)
            await target.start()
            assert await target.ask(_CALL, 2.5, lambda: first.append(None)) == _SERVED
            await target.close()
        [(head, body)] = asked
        sent = json.loads(body)
        assert head.startswith("POST /v1/chat/completions HTTP/1.1")
        assert "Authorization: Bearer k1" in head
        assert (sent["model"], sent["max_tokens"], sent["fairlane"]) == ("m", 2, {"timeout_ms": 2_500, "cache": "none"})
        assert sent.get("stream", False) is stream
        assert len(first) == stream

    asyncio.run(run())
