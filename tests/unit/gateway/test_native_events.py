"""What happens to a request, told as it happens: server-sent events and WebSockets over a real connection."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import httpx
import pytest
from starlette.types import Message, Scope
from structlog.testing import capture_logs
from uvicorn.protocols.utils import ClientDisconnected
from websockets.exceptions import ConnectionClosed, InvalidStatus

from fairlane.client.reassembly import TextDelta
from fairlane.outcomes import Decision
from fairlane.records import InferenceRequest, RequestInput
from producers.gateway.edge.access_log import CallLog
from producers.gateway.native.deps import EventPolicy, KeptStreams
from producers.gateway.native.events import MOST_WORDS, EventName, follow
from tests.kit.native_kit import ID, KEY, OTHER_KEY, QUESTION, WORK_KEY, Bench, decided, recorded, served
from tests.kit.native_socket import client, following, said, socket
from tests.kit.openai_kit import Gate, Script, ScriptedWaiting
from tests.kit.waiting import PATIENCE_S, eventually, eventually_async

STREAMED = QUESTION | {"parameters": {"stream": True}}


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def url(bench: Bench) -> Iterator[str]:
    with served(bench) as url:
        yield url


def test_a_stream_tells_its_text_as_it_is_made_and_ends_with_the_result(bench: Bench, url: str) -> None:
    gates = [Gate(), Gate()]
    bench.submitter.scripts.append(
        Script(
            deltas=(gates[0], TextDelta("The capital"), gates[1], TextDelta("Paris.", restarted=True, attempt=2)),
            before_reply=gates[1],
        )
    )
    with client(url) as http:
        request_id = http.post("/v1/requests", json=STREAMED).json()["id"]
    with following(url, request_id) as events:
        assert next(events)[1]["status"] == "queued"
        gates[0].open()
        assert next(events)[1]["status"] == "running"
        assert next(events) == ("delta", {"text": "The capital", "restarted": False, "attempt": 1})
        gates[1].open()
        assert next(events) == ("delta", {"text": "Paris.", "restarted": True, "attempt": 2})
        waiting = bench.submitter.waiting[0]
        bench.results.remember([waiting._reply])
        name, result = next(events)
        assert (name, result["id"], result["outcome"]) == ("result", request_id, "ok")
        assert list(events) == []
    assert waiting.forgotten
    assert not bench.submitter.cancelled


def test_who_stops_to_listen_does_not_cancel_the_request(bench: Bench, url: str) -> None:
    gate = Gate()
    bench.submitter.scripts.append(Script(deltas=(TextDelta("The"), gate), before_reply=gate))
    with client(url) as http:
        request_id = http.post("/v1/requests", json=STREAMED).json()["id"]
    with following(url, request_id) as events:
        assert [next(events)[0] for _ in range(3)] == ["status", "status", "delta"]
    waiting = bench.submitter.waiting[0]
    eventually(lambda: waiting.forgotten, what="the end of the stream")
    assert not bench.submitter.cancelled
    eventually(lambda: bench.deps.slots.total == 0)
    gate.open()


def test_changes_are_told_and_a_reply_that_comes_here_at_once(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with following(url) as events:
        assert next(events)[1]["status"] == "queued"
        bench.store.decide(decided(Decision.DISPATCHED, 2))
        assert next(events)[1]["status"] == "running"
        bench.results.remember([recorded(1, request_id=ID).reply])
        name, result = next(events)
        assert (name, result["output"]) == ("result", {"text": "answer 1"})
        assert list(events) == []


def test_a_reply_that_comes_elsewhere_is_found(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with following(url) as events:
        assert next(events)[0] == "status"
        bench.store.record(recorded(1, request_id=ID))
        assert next(events)[0] == "result"
        assert list(events) == []


def test_what_is_done_is_told_at_once(bench: Bench, url: str) -> None:
    bench.store.record(recorded(1, request_id=ID))
    with following(url) as events:
        assert [(name, body["status"]) for name, body in events] == [("status", "done"), ("result", "done")]


def test_a_stream_ends_with_its_status_when_no_result_comes_any_more(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with following(url) as events:
        assert next(events)[1]["status"] == "queued"
        bench.store.decide(decided(Decision.CACHED, 9))
        bench.store.erased.add(("acme", ID))
        assert [(name, body["status"]) for name, body in events] == [("status", "done")]
    with following(url) as events:
        assert [(name, body["status"]) for name, body in events] == [("status", "done")]


def test_who_comes_after_the_end_is_told_the_text_as_well(bench: Bench, url: str) -> None:
    bench.submitter.scripts.append(Script(deltas=(TextDelta("The capital"), TextDelta(" is Paris."))))
    with client(url) as http:
        request_id = http.post("/v1/requests", json=STREAMED).json()["id"]
    bench.results.remember([bench.submitter.waiting[0]._reply])
    with following(url, request_id) as events:
        told = list(events)
    assert [name for name, _ in told] == ["status", "delta", "delta", "result"]
    assert [body["text"] for name, body in told if name == "delta"] == ["The capital", " is Paris."]
    assert bench.submitter.waiting[0].forgotten


def test_a_text_whose_end_does_not_come_holds_no_result_back(bench: Bench, url: str) -> None:
    bench.submitter.scripts.append(Script(deltas=(TextDelta("The capital"), Gate())))
    with client(url) as http:
        request_id = http.post("/v1/requests", json=STREAMED).json()["id"]
    bench.results.remember([bench.submitter.waiting[0]._reply])
    with following(url, request_id) as events:
        assert [name for name, _ in events] == ["status", "delta", "result"]


def test_a_stream_lives_through_an_outage(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with following(url) as events:
        assert next(events)[0] == "status"
        bench.away(redis=True, postgres=True)
        asked = bench.store.questions
        eventually(lambda: bench.store.questions > asked, what="a look during the outage")
        bench.store.record(recorded(1, request_id=ID))
        bench.away()
        assert next(events)[0] == "result"


def test_silence_is_filled_and_a_stream_ends_some_time() -> None:
    bench = Bench(events=EventPolicy(ping_s=0.05, longest_s=0.5, first_look_s=10.0, longest_look_s=10.0))
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with served(bench) as url:
        with following(url) as events:
            names = [name for name, _ in events]
        assert (names[0], names[-1]) == ("status", "timeout")
        assert set(names[1:-1]) == {":"}
        with socket(url) as connection:
            assert said(connection)[0] == "status"
            assert said(connection) == ("ping", {})


def test_no_more_streams_than_there_may_be() -> None:
    bench = Bench(most_streams=4)
    for tenant in ("acme", "globex"):
        bench.store.decide(decided(Decision.ACCEPTED, 1, tenant=tenant))
    path = f"/v1/requests/{ID}/events"
    with served(bench) as url:
        with following(url) as first, socket(url) as second:
            assert next(first)[0] == said(second)[0] == "status"
            # A tenant has half of them.
            with client(url) as http:
                refused = http.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
            with pytest.raises(InvalidStatus) as caught, socket(url):
                pass
            assert caught.value.response.status_code == 429
            with socket(url, key=OTHER_KEY) as theirs:
                assert said(theirs)[0] == "status"
        eventually(lambda: bench.deps.slots.total == 0, what="the end of the streams")


def test_a_socket_tells_the_same(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with socket(url) as connection:
        assert said(connection)[1]["status"] == "queued"
        bench.store.decide(decided(Decision.DISPATCHED, 2))
        assert said(connection)[1]["status"] == "running"
        bench.results.remember([recorded(1, request_id=ID).reply])
        name, result = said(connection)
        assert (name, result["output"]) == ("result", {"text": "answer 1"})
        with pytest.raises(ConnectionClosed) as caught:
            connection.recv(PATIENCE_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1000


@pytest.mark.parametrize(
    ("key", "request_id", "status"),
    [(None, ID, 401), ("nobody", ID, 401), (WORK_KEY, ID, 403), (OTHER_KEY, ID, 404), (KEY, "1", 404)],
)
def test_a_socket_is_refused_before_it_is_open(
    bench: Bench, url: str, key: str | None, request_id: str, status: int
) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with pytest.raises(InvalidStatus) as caught, socket(url, request_id, key):
        pass
    assert caught.value.response.status_code == status
    assert "error" in json.loads(caught.value.response.body or b"{}")


@pytest.mark.parametrize("key", [KEY, "nobody"], ids=["accepted", "refused"])
def test_who_has_left_before_a_socket_is_open_is_no_error(bench: Bench, key: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    scope: Scope = {
        "type": "websocket",
        "path": f"/v1/requests/{ID}/events",
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode())],
        "extensions": {"websocket.http.response": {}},
    }
    sent: list[str] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message["type"])
        # As uvicorn says it.
        raise ClientDisconnected

    with capture_logs() as lines:
        asyncio.run(CallLog(bench.app)(scope, receive, send))
    assert sent == ["websocket.accept" if key == KEY else "websocket.http.response.start"]
    assert [line["event"] for line in lines] == ["call"]


def test_a_socket_is_for_listening(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with socket(url) as connection:
        assert said(connection)[0] == "status"
        for _ in range(MOST_WORDS):
            connection.send("hello")
        with pytest.raises(ConnectionClosed) as caught:
            list(iter(partial(connection.recv, PATIENCE_S), None))
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
    eventually(lambda: bench.deps.slots.total == 0, what="the end of the stream")


def test_a_listener_that_goes_away_is_let_go(bench: Bench, url: str) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with socket(url) as connection, following(url) as events:
        assert said(connection)[0] == next(events)[0] == "status"
        assert bench.deps.slots.total == 2
    eventually(lambda: bench.deps.slots.total == 0, what="the end of the streams")
    assert len(bench.results.arrivals) == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_ends_when_waiting_ends(bench: Bench, is_late: bool) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))

    async def test(_http: httpx.AsyncClient) -> None:
        status = await bench.results.status("acme", ID)
        assert status is not None
        arrivals = bench.results.arrivals
        if is_late:
            arrivals.end_waiting()
        events = follow(bench.deps, "acme", status)
        assert (await anext(events)).name is EventName.STATUS
        coming = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        arrivals.end_waiting()
        assert (await coming).name is EventName.TIMEOUT
        assert [event async for event in events] == []

    bench.run(test)


def test_a_text_that_nobody_asks_for_is_let_go(bench: Bench, url: str) -> None:
    kept = bench.deps.kept._kept
    kept._most = 4
    gate = Gate()
    with client(url) as http:
        for _ in range(5):
            bench.submitter.scripts.append(Script(before_reply=gate))
            assert http.post("/v1/requests", json=STREAMED).status_code == 202
    assert len(kept) == 4
    assert [waiting.forgotten for waiting in bench.submitter.waiting].count(True) == 1
    assert bench.submitter.waiting[0].forgotten


def test_anothers_reply_with_the_same_id_is_not_told(bench: Bench, url: str) -> None:
    theirs = recorded(1, "globex", request_id=ID)
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with following(url) as events:
        assert next(events)[0] == "status"
        bench.results.remember([replace(theirs.reply, model="theirs")])
        bench.results.remember([recorded(1, request_id=ID).reply])
        assert next(events)[1]["output"] == {"text": "answer 1"}


def test_a_text_is_kept_for_a_while_alone() -> None:
    async def test() -> None:
        kept = KeptStreams(keep_s=0.01)
        waiting = ScriptedWaiting(
            InferenceRequest(ID, "m", "generate", RequestInput(prompt="q")), recorded(1).reply, Script()
        )
        kept.keep(waiting)  # type: ignore[arg-type]  # a double
        assert kept.claim("globex", waiting.request_id) is None
        await eventually_async(lambda: waiting.forgotten, what="the end of its time")
        assert kept.claim("acme", waiting.request_id) is None

    asyncio.run(test())
