"""Connections that hold on to the gateway: too many, too slow, too large, or taking nothing of what they are sent."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState
from websockets.sync.client import connect

from producers.gateway.edge.connections import (
    CloseReason,
    Connection,
    Connections,
    ConnectionTimeouts,
    Inflow,
    Outflow,
    ReceiveStage,
)
from producers.gateway.edge.limited_protocol import (
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    MOST_PIPELINED,
    MOST_PIPELINED_BYTES,
    LimitedProtocol,
)
from tests.kit.edge_kit import cut, drip, edge, everything
from tests.kit.waiting import PATIENCE_S, eventually

LONG = ConnectionTimeouts(head_s=600.0, idle_s=600.0, span_s=600.0, taken_span_s=600.0, look_s=0.02)
HEAD = b"GET /nothing HTTP/1.1\r\nhost: gateway\r\n"
CALL = HEAD + b"\r\n"
POST = b"POST /read HTTP/1.1\r\nhost: gateway\r\n"
WAITS = b"GET /waits HTTP/1.1\r\nhost: gateway\r\n\r\n"
UPGRADE = (
    b"GET /socket HTTP/1.1\r\nhost: gateway\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def short(**fields: float) -> Connections:
    """Patient but for this."""
    return Connections(100, 100, replace(LONG, **fields))  # type: ignore[arg-type]  # all are numbers


@contextmanager
def cut_once(why: CloseReason) -> Iterator[None]:
    before = cut(why)
    yield
    eventually(lambda: cut(why) > before, what=f"a connection that is cut for {why}")


# Pure


def test_a_body_must_end_or_move_in_every_span() -> None:
    flow = Inflow(ConnectionTimeouts(span_s=30.0, bytes_per_s=1_000), 0.0)
    flow.enter(ReceiveStage.BODY, 100.0)
    flow.take(29_999)
    assert flow.late(129.9, is_paused=False) is None
    assert flow.late(130.0, is_paused=False) is CloseReason.SLOW_BODY
    flow.take(1)
    assert flow.late(130.0, is_paused=False) is None
    # What came fast before is no credit.
    flow.take(29_999)
    assert flow.late(160.0, is_paused=False) is CloseReason.SLOW_BODY


@pytest.mark.parametrize(
    ("stage", "why"), [(ReceiveStage.HEAD, CloseReason.SLOW_HEAD), (ReceiveStage.BODY, CloseReason.SLOW_BODY)]
)
def test_what_is_not_read_on_is_not_late(stage: ReceiveStage, why: CloseReason) -> None:
    flow = Inflow(ConnectionTimeouts(head_s=30.0, span_s=30.0), 0.0)
    flow.enter(stage, 0.0)
    assert flow.late(1_000.0, is_paused=True) is None
    assert flow.late(1_029.0, is_paused=False) is None
    assert flow.late(1_030.0, is_paused=False) is why


@pytest.mark.parametrize(
    ("stage", "after_s", "why"),
    [
        (ReceiveStage.HEAD, 10.0, CloseReason.SLOW_HEAD),
        (ReceiveStage.LEFTOVER, 10.0, CloseReason.UNREAD_BODY),
        (ReceiveStage.IDLE, 75.0, CloseReason.IDLE),
        (ReceiveStage.NOTHING, 1e9, None),
    ],
)
def test_each_stage_has_its_time(stage: ReceiveStage, after_s: float, why: CloseReason | None) -> None:
    flow = Inflow(ConnectionTimeouts(), 0.0)
    flow.enter(stage, 5.0)
    flow.take(1_000_000)
    assert flow.late(5.0 + after_s - 0.1, is_paused=False) is None
    assert flow.late(5.0 + after_s, is_paused=False) is why


def test_what_is_written_must_be_taken() -> None:
    flow = Outflow(ConnectionTimeouts(taken_span_s=30.0, bytes_per_s=1_000))
    assert not flow.is_stuck(0.0, 100_000, 0)
    assert not flow.is_stuck(1.0, 200_000, 100_000)
    assert not flow.is_stuck(30.9, 200_000, 70_001)
    assert flow.is_stuck(31.0, 200_000, 70_001)
    # Enough of it, though as much is written meanwhile.
    assert not flow.is_stuck(31.0, 230_000, 100_000)
    assert not flow.is_stuck(60.9, 230_000, 100_000)
    assert flow.is_stuck(61.0, 230_000, 100_000)


def test_a_little_that_is_written_must_be_taken_whole() -> None:
    flow = Outflow(ConnectionTimeouts(taken_span_s=30.0, bytes_per_s=1_000))
    assert not flow.is_stuck(0.0, 100, 100)
    assert not flow.is_stuck(30.0, 200, 100)
    assert flow.is_stuck(60.0, 200, 1)
    assert not flow.is_stuck(60.0, 200, 0)
    assert not flow.is_stuck(1_000.0, 300, 100)


def test_there_are_so_many_of_all_and_of_each() -> None:
    connections = Connections(3, 2)
    assert [connections.enter("a"), connections.enter("a")] == [None, None]
    assert connections.enter("a") is CloseReason.TOO_MANY_OF_ADDRESS
    assert connections.enter("b") is None
    assert connections.enter("c") is CloseReason.TOO_MANY
    connections.leave("a")
    assert connections.enter("a") is None
    assert len(connections) == 3


class Clock:
    """An event loop of which only the time is used, and one look at a time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.look: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now_s

    def call_later(self, _delay_s: float, look: Callable[[], None]) -> None:
        self.look = look


class FullTransport(asyncio.Transport):
    """Over a socket whose buffer is full of what the other side does not read, with as much again behind it.

    Attributes:
        buffered_bytes: that the socket did not take.
        aborted: whether it was.
    """

    def __init__(self, mine: socket.socket) -> None:
        super().__init__({"socket": mine})
        mine.setblocking(False)
        self._mine = mine
        self.buffered_bytes = 0
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        taken_bytes = 0
        with suppress(BlockingIOError):
            while taken_bytes < len(data):
                taken_bytes += self._mine.send(data[taken_bytes:])
        self.buffered_bytes = len(data) - taken_bytes

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what the other side has acknowledged")
def test_who_reads_slowly_is_not_cut_while_the_socket_takes_nothing_more() -> None:
    clock, connections = Clock(), Connections(1, 1, ConnectionTimeouts(taken_span_s=100.0, bytes_per_s=1_000))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        peer.settimeout(PATIENCE_S)
        mine, _ = server.accept()
        with mine:
            transport = FullTransport(mine)
            connection = Connection(connections, transport, clock, lambda _now_s: None)  # type: ignore[arg-type]
            connection.transport.write(b"x" * 32 * 1024 * 1024)
            assert transport.buffered_bytes
            clock.look()
            untaken_bytes = connection.transport.untaken_bytes()
            while connection.transport.untaken_bytes() > untaken_bytes - 100_000:
                peer.recv(50_000)
            clock.now_s = 100.0
            clock.look()
            assert not transport.aborted
            # It reads no more.
            clock.now_s = 200.0
            clock.look()
            assert transport.aborted


class Reads(asyncio.Transport):
    """To nobody."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False
        self._is_closing = False

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False

    def is_reading(self) -> bool:
        return not self._is_paused

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def close(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0


async def _nothing(_scope: object, _receive: object, _send: object) -> None:
    """Never called."""


class Unanswered(LimitedProtocol):
    """No application answers its calls."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: object) -> None:
        self._running = cycle


@contextmanager
def answering() -> Iterator[tuple[Unanswered, Reads]]:
    """A connection on which every read is as large as is said."""
    config = uvicorn.Config(_nothing, ws="websockets-sansio", lifespan="off", log_config=None)
    config.load()
    with ExitStack() as stack:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            stack.callback(loop.close)
        protocol = Unanswered(Connections(10, 10, LONG), config, ServerState(), {}, loop)
        transport = Reads()
        protocol.connection_made(transport)
        yield protocol, transport
        protocol.connection_lost(None)


async def answer(cycle: RequestResponseCycle) -> None:
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await cycle.send({"type": "http.response.body", "body": b"", "more_body": False})


# On a socket


@pytest.mark.parametrize("connections", [Connections(2, 10, LONG), Connections(10, 2, LONG)], ids=["all", "address"])
def test_one_too_many_is_sent_away(connections: Connections) -> None:
    why = CloseReason.TOO_MANY if connections._most == 2 else CloseReason.TOO_MANY_OF_ADDRESS
    with edge(connections) as served, ExitStack() as stack:
        first = stack.enter_context(served.connected(CALL))
        stack.enter_context(served.connected())
        eventually(lambda: len(connections) == 2, what="two connections")
        with cut_once(why), served.connected() as third:
            assert everything(third).startswith(b"HTTP/1.1 503 ")
        assert len(connections) == 2
        first.close()
        eventually(lambda: len(connections) == 1, what="the end of one")
        with served.connected(CALL) as again:
            assert again.recv(12) == b"HTTP/1.1 404"


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"a: b\r\n\r\n", b"404"),
        (b"a: " + b"b" * (MOST_HEAD_BYTES + 1) + b"\r\n\r\n", b"431"),
        (b"a: " + b"b" * 2 * MOST_HEAD_BYTES, b"431"),
        (b"a: b\r\n" * (MOST_HEADERS + 1) + b"\r\n", b"431"),
        (b"a b\r\n\r\n", b"400"),
    ],
    ids=["small", "large", "endless", "many", "nonsense"],
)
def test_a_head_has_bounds(rest: bytes, status: bytes) -> None:
    with edge(short()) as served, served.connected(HEAD + rest) as peer:
        assert peer.recv(12)[9:] == status


@pytest.mark.parametrize("begun", [b"", b"GET /noth", HEAD], ids=["nothing", "a line", "headers"])
def test_a_head_comes_in_its_time(begun: bytes) -> None:
    with edge(short(head_s=0.2)) as served, cut_once(CloseReason.SLOW_HEAD), served.connected(begun) as peer:
        drip(peer, b"" if not begun else b"a")


def test_a_body_of_a_byte_at_a_time_is_not_waited_for() -> None:
    begun = POST + b"content-length: 100000\r\n\r\n"
    with edge(short(span_s=0.3)) as served, cut_once(CloseReason.SLOW_BODY), served.connected(begun) as peer:
        drip(peer, b"x")
        eventually(lambda: served.tasks == 0, what="the end of the call")


def test_what_moves_no_body_is_not_waited_for() -> None:
    """Extensions of chunks, which are no body, and a trailer that has no end."""
    begun = POST + b"transfer-encoding: chunked\r\n\r\n"
    with edge(short(span_s=0.3)) as served, cut_once(CloseReason.SLOW_BODY), served.connected(begun) as peer:
        drip(peer, b"1;" + b"a" * 2_000 + b"\r\nx\r\n")
    with edge(short()) as served, cut_once(CloseReason.HEAD_TOO_LARGE), served.connected(begun) as peer:
        peer.sendall(b"0\r\na: ")
        drip(peer, b"a" * 2_000)


def test_a_body_that_nobody_reads_is_not_waited_for() -> None:
    begun = b"POST /refused HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100000000\r\n\r\n"
    with edge(short(head_s=0.3)) as served, cut_once(CloseReason.UNREAD_BODY), served.connected(begun) as peer:
        assert peer.recv(12) == b"HTTP/1.1 401"
        drip(peer, b"x" * 1_000)


@pytest.mark.parametrize("line", [b"", b"\r\n"], ids=["nothing", "blank lines"])
def test_an_answered_connection_is_kept_for_a_while(line: bytes) -> None:
    with edge(short(idle_s=0.3)) as served, cut_once(CloseReason.IDLE), served.connected(CALL) as peer:
        assert peer.recv(12) == b"HTTP/1.1 404"
        drip(peer, line)


def test_calls_one_behind_the_other_are_answered() -> None:
    calls = (
        3 * CALL + POST + b"content-length: 5\r\n\r\nabcde" + POST + b"content-length: 2\r\nconnection: close\r\n\r\nab"
    )
    with edge(short()) as served, served.connected(calls) as peer:
        said = everything(peer)
    assert said.count(b"HTTP/1.1 404") == 3
    assert said.count(b"HTTP/1.1 200") == 2
    assert said.endswith(b'{"bytes":2}')


@pytest.mark.parametrize("path", [b"/large", b"/endless"])
def test_who_takes_nothing_of_an_answer_is_let_go(path: bytes) -> None:
    connections = short(taken_span_s=0.3)
    call = b"GET " + path + b" HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n"
    with edge(connections) as served, cut_once(CloseReason.UNTAKEN), served.connected(call) as peer:
        assert peer.recv(12) == b"HTTP/1.1 200"
        eventually(lambda: not len(connections) and served.tasks == 0, what="the end of the call")


def test_who_takes_nothing_of_a_websocket_is_let_go() -> None:
    connections = short(taken_span_s=0.3)
    with edge(connections) as served, cut_once(CloseReason.UNTAKEN), served.connected(UPGRADE + b"\r\n") as peer:
        assert peer.recv(12) == b"HTTP/1.1 101"
        # Masked with nothing: "tell", and pings, whose answers are not taken either.
        peer.sendall(b"\x81\x84\x00\x00\x00\x00tell" + b"\x89\x80\x00\x00\x00\x00" * 1_000)
        eventually(lambda: not len(connections) and served.tasks == 0, what="the end of the WebSocket")


def test_a_websocket_is_a_connection_until_it_ends() -> None:
    connections = short(head_s=0.1, idle_s=0.1, span_s=0.1, taken_span_s=0.1)
    with edge(connections) as served:
        with connect(f"ws://127.0.0.1:{served.port}/socket", open_timeout=PATIENCE_S) as websocket:
            assert len(connections) == 1
            websocket.send("end")
            assert list(websocket) == []
        eventually(lambda: not len(connections), what="the end of the WebSocket")


@pytest.mark.parametrize(("first", "then"), [(CALL, b""), (b"", CALL)], ids=["at once", "later"])
def test_a_call_whose_caller_has_left_is_told_though_another_came_behind_it(
    first: bytes, then: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with edge(short()) as served:
        with served.connected(b"GET /waits HTTP/1.1\r\nhost: gateway\r\n\r\n" + first) as peer:
            eventually(lambda: served.tasks == 1, what="the call")
            peer.sendall(then)
        eventually(lambda: served.tasks == 0, what="the end of the call")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_websocket_that_cannot_be_is_refused() -> None:
    """Its head is one for HTTP, and too large for a WebSocket."""
    with edge(short()) as served, cut_once(CloseReason.MALFORMED), served.connected() as peer:
        peer.sendall(UPGRADE + b"a: " + b"b" * 10_000 + b"\r\n\r\n")
        assert everything(peer).startswith(b"HTTP/1.1 431 ")


def test_no_websocket_begins_in_the_middle_of_an_answer() -> None:
    with edge(short()) as served, cut_once(CloseReason.MALFORMED), served.connected() as peer:
        peer.sendall(b"GET /endless HTTP/1.1\r\nhost: gateway\r\n\r\n")
        assert peer.recv(12) == b"HTTP/1.1 200"
        peer.sendall(UPGRADE + b"\r\n")
        assert b"HTTP/1.1" not in everything(peer)
        eventually(lambda: served.tasks == 0, what="the end of the call")


@pytest.mark.parametrize(
    ("rest", "status"),
    [(b"", b"401"), (b"a: b\r\n" * MOST_HEADERS, b"431"), (b"a b\r\n", b"400")],
    ids=["by the route", "too many headers", "nonsense"],
)
def test_a_call_that_is_refused_before_its_body_was_read_is_not_reset(rest: bytes, status: bytes) -> None:
    """A balancer would take a reset for a failure of the gateway, and leave it out."""
    head = b"POST /closed HTTP/1.1\r\nhost: gateway\r\ncontent-length: 33554432\r\n"
    with edge(Connections(10, 10, LONG)) as served, served.connected() as peer:
        # More than both systems buffer, so that it is sent whole only if it is read.
        peer.sendall(head + rest + b"\r\n" + b"x" * 33_554_431)
        said = b""
        while piece := peer.recv(65_536):
            said += piece
        assert said[9:12] == status
        assert b"connection: close" in said


def test_who_does_not_end_after_the_last_answer_is_cut() -> None:
    with edge(short(head_s=0.2)) as served, served.connected() as peer, cut_once(CloseReason.UNREAD_BODY):
        peer.sendall(b"POST /closed HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100\r\n\r\n")
        assert everything(peer).startswith(b"HTTP/1.1 401 ")
        drip(peer, b"x")


@pytest.mark.parametrize(
    "behind",
    [
        CALL * (MOST_PIPELINED + 1),
        7 * (POST + b"content-length: 16000\r\n\r\n" + b"x" * 16_000),
        POST + b"content-length: 100000\r\n\r\n" + b"x" * (MOST_PIPELINED_BYTES + 1),
        HEAD + b"a: " + b"b" * (MOST_PIPELINED_BYTES + 1),
    ],
    ids=["calls", "bodies", "a body", "a head"],
)
def test_what_waits_behind_a_call_has_a_bound(behind: bytes) -> None:
    with answering() as (protocol, transport), cut_once(CloseReason.PIPELINED):
        protocol.data_received(WAITS + behind)
        assert transport.is_closing()


def test_the_body_of_the_call_that_is_answered_does_not_wait() -> None:
    own = POST + b"content-length: 200000\r\n\r\n" + b"x" * 200_000
    with answering() as (protocol, transport):
        protocol.data_received(own + POST + b"content-length: 4\r\n\r\nbody")
        assert not transport.is_closing()
        assert len(protocol.pipeline) == 1


def test_nothing_is_read_behind_a_call_that_waits_until_its_turn() -> None:
    async def talk() -> None:
        with answering() as (protocol, transport):
            protocol.data_received(WAITS)
            first = protocol.cycle
            await first.receive()
            assert transport.is_reading()
            protocol.data_received(POST + b"content-length: 8\r\n\r\nbody")
            assert not transport.is_reading()
            # Whoever streams an answer asks again and again whether its caller is there.
            with suppress(TimeoutError):
                await asyncio.wait_for(first.receive(), 0.01)
            assert not transport.is_reading()
            await answer(first)
            assert transport.is_reading()
            second = protocol.cycle
            assert dict(await second.receive())["body"] == b"body"
            protocol.data_received(b"rest" + 2 * CALL)
            assert dict(await second.receive())["body"] == b"rest"
            third = protocol.pipeline[-1][0]
            await answer(second)
            # One more waits still.
            assert not transport.is_reading()
            await answer(third)
            assert transport.is_reading()

    asyncio.run(talk())


def test_a_body_behind_another_is_read_in_its_turn() -> None:
    with edge(Connections(10, 10, LONG)) as served, served.connected(POST + b"content-length: 10\r\n\r\nb") as peer:
        eventually(lambda: served.tasks == 1, what="the call")
        peer.sendall(b"odies" + b"more" + POST + b"content-length: 30000\r\nconnection: close\r\n\r\n" + b"x" * 30_000)
        said = everything(peer)
    assert b'{"bytes":10}' in said
    assert said.endswith(b'{"bytes":30000}')


def test_a_few_calls_at_once_are_answered_one_after_the_other() -> None:
    with edge(Connections(10, 10, LONG)) as served, served.connected() as peer:
        peer.sendall((POST + b"content-length: 4\r\n\r\nbody") * MOST_PIPELINED)
        said = b""
        while said.count(b'{"bytes":4}') < MOST_PIPELINED:
            said += peer.recv(65_536)


@pytest.mark.parametrize("sent", [CALL, UPGRADE + b"\r\n", b"nonsense\r\n\r\n", HEAD + b"x" * 50_000 + b"\r\n\r\n"])
def test_no_answer_is_sniffed_or_says_what_answers(sent: bytes) -> None:
    with edge(Connections(10, 10, LONG)) as served, served.connected(sent) as peer:
        head = b""
        while b"\r\n\r\n" not in head:
            head += peer.recv(65_536)
    fields = [line.partition(b":")[0].lower() for line in head.partition(b"\r\n\r\n")[0].splitlines()[1:]]
    assert fields.count(b"x-content-type-options") == 1
    assert b"server" not in fields
