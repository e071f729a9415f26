"""Gateways are killed while calls wait at them, and between two tries of one call: what was accepted is answered once,
and found at the other gateway, also by its key."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from uuid import uuid4

import httpx
import pytest

from fairlane.names import requests_topic
from producers.gateway.idempotency import IN_FLIGHT
from producers.openai_api.errors import REQUEST_ID_HEADER
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.gateway_traffic import CALL_PATIENCE_S, Traffic, check_promise, until_taken
from tests.kit.log_reader import LogReader
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
WAITING_CALLS = 200
AT_ONCE = 20
"""Sent together."""
TRIES = 8
BOTH = (1, 2)


@pytest.fixture(scope="module")
def two_gateways(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("gateways"), redis_url=redis_url) as served:
        # A consumer that is paused stays a member.
        served.pipeline.lengthen_session(60)
        served.gateway(2).wait_ready()
        yield served


@pytest.fixture
def served(two_gateways: Served) -> Served:
    """Both gateways run, whatever an earlier test did to them."""
    for number in BOTH:
        start_again(two_gateways, number)
    return two_gateways


def start_again(served: Served, number: int) -> None:
    """A gateway that was killed, unless it runs."""
    process = served.pipeline.processes[f"gateway-{number}"]
    if not process.alive:
        process.start().wait_ready()


def requests_from_now(served: Served) -> LogReader:
    return served.pipeline.reader(requests_topic(served.pipeline.tenant("a")), from_beginning=False)


def ids_of(reader: LogReader) -> set[str]:
    """Of everything that it has read: also of what was published twice, and of cancels."""
    return {(record.key() or b"").decode() for record in reader.records}


def wait_for_ids(reader: LogReader, number: int) -> None:
    reader.wait(lambda: len(ids_of(reader)) == number, 2 * PATIENCE_S, "the requests")


@contextmanager
def waiting_calls(
    served: Served, keys: Sequence[str], number: int, requests: LogReader
) -> Iterator[list["Future[httpx.Response]"]]:
    """A call that waits for its answer under each of these keys. All their requests are in the log."""
    url, headers, limits = served.url(number=number), served.headers(), httpx.Limits(max_connections=len(keys))
    with (
        httpx.Client(base_url=url, headers=headers, timeout=CALL_PATIENCE_S, limits=limits) as client,
        ThreadPoolExecutor(len(keys)) as pool,
    ):
        calls: list[Future[httpx.Response]] = []
        for first in range(0, len(keys), AT_ONCE):
            calls += [pool.submit(called, client, served, key) for key in keys[first : first + AT_ONCE]]
            wait_for_ids(requests, len(calls))
        yield calls


def called(client: httpx.Client, served: Served, key: str) -> httpx.Response:
    # Under each key the same body whenever it is sent.
    body, headers = served.chat(f"question {key}"), {"Idempotency-Key": key}
    return until_taken(lambda: client.post(CHAT, json=body, headers=headers))


def test_calls_that_waited_at_a_gateway_that_was_killed(served: Served) -> None:
    reader = requests_from_now(served)
    keys = [str(uuid4()) for _ in range(WAITING_CALLS)]
    with served.client(number=2) as other:
        with served.engines_paused(), waiting_calls(served, keys, 1, reader) as calls:
            served.pipeline.processes["gateway-1"].kill()
            assert all(isinstance(call.exception(PATIENCE_S), httpx.TransportError) for call in calls)
            request_ids = {}
            for key in keys:
                told = called(other, served, key)
                assert (told.status_code, told.json()["error"]["code"]) == (409, IN_FLIGHT), told.text
                request_ids[key] = told.headers[REQUEST_ID_HEADER]
        assert set(request_ids.values()) == ids_of(reader)
        missing = set(keys)

        def answered() -> bool:
            # The consumer may have been paused for longer than its group waits.
            served.run_all()
            for key in sorted(missing):
                again = called(other, served, key)
                assert again.status_code in (200, 409), again.text
                assert again.headers[REQUEST_ID_HEADER] == request_ids[key]
                if again.status_code == 200:
                    missing.discard(key)
            return not missing

        eventually(answered, 2 * PATIENCE_S, "the answers of calls whose gateway died")
    check_promise(served, request_ids.values(), number=2)
    reader.read_to_end()
    assert ids_of(reader) == set(request_ids.values()), "nothing was run a second time"


def test_a_key_outlives_the_gateway_that_took_it(served: Served) -> None:
    reader = requests_from_now(served)
    body = {**served.question(), "timeout_ms": LONG_MS}
    headers = [{"Idempotency-Key": str(uuid4())} for _ in range(TRIES)]

    def tried(number: int) -> list[str]:
        with served.client(number=number) as client:
            answers = [
                until_taken(partial(client.post, "/v1/requests", json=body, headers=header)) for header in headers
            ]
        assert {answer.status_code for answer in answers} <= {202, 409}, {answer.text for answer in answers}
        return [answer.headers[REQUEST_ID_HEADER] for answer in answers]

    with served.engines_paused():
        first = tried(1)
        served.pipeline.processes["gateway-1"].kill()
        assert tried(2) == first
    check_promise(served, first, number=2)
    start_again(served, 1)
    assert tried(1) == first
    reader.read_to_end()
    assert ids_of(reader) == set(first), "nothing was run a second time"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_call_is_done_once_whichever_gateway_is_killed(
    served: Served, seed: int, say: Callable[[str], None]
) -> None:
    dice = random.Random(seed)
    say(f"seed {seed}")
    reader = requests_from_now(served)
    with Traffic(served, gateways=BOTH) as traffic:
        for _ in range(10):
            # At whatever a call is just then, also between its claim and its publish.
            traffic.wait_more(dice.randint(10, 60), "calls at both gateways", CALL_PATIENCE_S)
            number = dice.choice(BOTH)
            served.pipeline.processes[f"gateway-{number}"].kill()
            traffic.wait_more(10, "calls at the other gateway", CALL_PATIENCE_S)
            start_again(served, number)
            say(f"killed gateway {number}; {len(traffic.ids)} requests")
    say(f"{len(traffic.ids)} requests, {len(traffic.refused)} refusals")
    check_promise(served, traffic.ids)
    reader.read_to_end()
    assert ids_of(reader) == traffic.ids, "nothing was run under another id"
