"""The gateway on a real broker: replies come back, and nothing is lost when something dies or is away."""

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection

import httpx
import pytest

from deploy.local.services import HOST
from fairlane.names import GATEWAY_REPLIES, requests_topic
from fairlane.records import CancelRequest, InferenceRequest
from tests.kit.gateway_kit import Served, serving
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.broker

WAITING_CALLS = 40


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("gateway"), redis_url=redis_url) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


@contextmanager
def waiting_calls(served: Served, number: int = 1) -> Iterator[tuple[list["Future[httpx.Response]"], list[str]]]:
    """Calls that wait for their answers at a gateway, all of them published; and the ids of their requests."""
    reader = served.pipeline.reader(requests_topic(served.pipeline.tenant("a")), from_beginning=False)
    url, headers = served.url("/v1/chat/completions", number), served.headers("a")

    def call(at: int) -> httpx.Response:
        # A connection each: one that is lost takes no other call with it.
        return httpx.post(url, json=served.chat(f"call {at}"), headers=headers, timeout=2 * PATIENCE_S)

    with ThreadPoolExecutor(WAITING_CALLS) as pool:
        calls = [pool.submit(call, at) for at in range(WAITING_CALLS)]
        reader.wait(lambda: len(reader.records) >= WAITING_CALLS, what="the requests")
        yield calls, [(record.key() or b"").decode() for record in reader.records]


def test_a_call_is_answered_and_says_which_request_it_was(served: Served, client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=served.chat())
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    found = client.get(f"/v1/results/{answer.headers['x-request-id']}")
    assert found.status_code == 200, found.text


def test_text_is_streamed_as_it_is_made(served: Served, client: httpx.Client) -> None:
    body = served.chat(max_tokens=64, stream=True, stream_options={"include_usage": True})

    def in_pieces() -> bool:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        events = [json.loads(line) for line in lines[:-1]]
        assert events[-1]["usage"]["completion_tokens"] > 0
        texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        return len([text for text in texts if text]) > 1

    # The first stream of a tenant may begin before its chunks are read, and on a busy machine a reply overtakes them.
    eventually(in_pieces, what="a stream of more than the whole reply at once")


def test_the_reply_of_another_tenants_request_is_nobodys(served: Served, client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=served.chat())
    with served.client("b") as other:
        found = other.get(f"/v1/results/{answer.headers['x-request-id']}")
    assert found.status_code == 404


def test_a_caller_who_goes_away_cancels(served: Served) -> None:
    reader = served.pipeline.reader(requests_topic(served.pipeline.tenant("a")), from_beginning=False)
    call = HTTPConnection(HOST, served.ports["gateway-1"], timeout=PATIENCE_S)
    with served.engines_paused():
        headers = {**served.headers(), "content-type": "application/json"}
        call.request("POST", "/v1/chat/completions", json.dumps(served.chat()), headers)
        reader.wait(lambda: len(reader.records) >= 1, what="the request")
        call.close()
        reader.wait(lambda: len(reader.records) >= 2, what="its cancel")
    request, cancel = (served.pipeline.codec.decode(record.value()) for record in reader.records[:2])
    assert isinstance(request, InferenceRequest)
    assert isinstance(cancel, CancelRequest)
    assert cancel.request_id == request.request_id


def test_a_body_or_a_head_that_is_too_large_is_refused(served: Served, client: httpx.Client) -> None:
    big = client.post("/v1/chat/completions", json=served.chat("x" * 5_000_000))
    assert (big.status_code, big.json()["error"]["param"]) == (413, "body")
    pieces = client.post("/v1/chat/completions", content=(b"x" * 65_536 for _ in range(100)))
    assert pieces.status_code == 413
    heads = client.get("/v1/models", headers={"x-much": "x" * 40_000})
    assert heads.status_code == 431
    assert client.get("/v1/models").status_code == 200


def test_an_unknown_model_is_refused_without_a_request(served: Served, client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=served.chat(model="no-such-model"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# From here on a second gateway runs; the first one is killed last but one.


def test_calls_of_a_partition_that_moved_are_answered_all_the_same(served: Served) -> None:
    with served.engines_paused(), waiting_calls(served) as (calls, _):
        served.gateway(2).wait_ready()
        group = f"{served.pipeline.group_prefix}.gateway"
        eventually(
            lambda: {len(owned) for owned in served.pipeline.assignments(group).values()} == {6},
            what="half of the partitions each",
        )
        served.resume()
        answers = [call.result(2 * PATIENCE_S) for call in calls]
    assert {answer.status_code for answer in answers} == {200}, {answer.text for answer in answers}
    looked_up = served.pipeline.processes["gateway-1"].metric("fairlane_gateway_reply_look_ups_total", result="found")
    assert looked_up > 0, "some partition that was waited for moved"


def test_the_results_of_calls_that_waited_at_a_gateway_that_was_killed_are_found(served: Served) -> None:
    second(served)
    with served.engines_paused(), waiting_calls(served) as (calls, published):
        served.pipeline.processes["gateway-1"].kill()
        assert all(isinstance(call.exception(PATIENCE_S), httpx.TransportError) for call in calls)
    missing = set(published)

    def found() -> bool:
        for request_id in list(missing):
            if other.get(f"/v1/results/{request_id}").status_code == 200:
                missing.discard(request_id)
        return not missing

    with served.client(number=2) as other:
        eventually(found, 2 * PATIENCE_S, "the results of calls whose gateway died")
    replies = served.pipeline.reader(GATEWAY_REPLIES)
    replies.read_to_end()
    answered = [(record.key() or b"").decode() for record in replies.records]
    assert all(answered.count(request_id) == 1 for request_id in published)


def test_a_gateway_that_drains_answers_what_it_took_and_ends_well(served: Served) -> None:
    gateway = second(served)
    with served.engines_paused(), waiting_calls(served, 2) as (calls, _):
        with served.client(number=2) as client:
            links = client.post("/v1/requests", json=served.question()).json()["links"]
            with client.stream("GET", links["events"]) as following:
                lines = following.iter_lines()
                assert next(lines) == "event: status"
                gateway.send(signal.SIGTERM)
                # Who only listens is not waited for, though the others are.
                assert [line for line in lines if line.startswith("event: ")][-1] == "event: timeout"
        eventually(lambda: not takes_connections(served, 2), what="the end of its port")
        assert gateway.get("/health/ready")[0] == 503
        served.resume()
        answers = [call.result(2 * PATIENCE_S) for call in calls]
    assert {answer.status_code for answer in answers} == {200}
    assert gateway.wait_ended() == 0


def takes_connections(served: Served, number: int) -> bool:
    try:
        httpx.get(served.url("/health", number), timeout=PATIENCE_S)
    except httpx.ConnectError:
        return False
    return True


def second(served: Served) -> ServiceProcess:
    """The second gateway, whether or not it ran before this test."""
    gateway = served.pipeline.processes.get("gateway-2")
    return gateway if gateway is not None and gateway.alive else served.gateway(2).wait_ready()
