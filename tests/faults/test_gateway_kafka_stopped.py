"""Kafka hangs for 20 s under calls of the gateway: they are told to come again, and nothing accepted is lost or done
twice."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from deploy.local.stack import LocalStack
from fairlane.clock import now_ms
from fairlane.names import GATEWAY_REPLIES
from producers.gateway.errors import UNAVAILABLE
from producers.gateway.reply_errors import UNCERTAIN
from tests.integration.gateway_kit import Served, serving
from tests.integration.log_reader import Replies
from tests.stack import PostgresServer
from tests.waiting import PATIENCE_S, eventually, until_ms

pytestmark = [pytest.mark.broker, pytest.mark.long]

CALLERS = 8
OUTAGE_MS = 20_000
AROUND = 100
"""Requests that are accepted before the outage, and after it."""


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[LocalStack]:
    """A broker that this test alone uses."""
    with LocalStack(data_dir=tmp_path / "kafka", parts=("kafka",), environ={}) as stack:
        yield stack
        stack.supervisor.request_stop(now=True)


@dataclass
class Traffic:
    """Callers who send one request after another, each again under its key until it is accepted."""

    served: Served
    accepted: dict[str, str] = field(default_factory=dict)
    """The id by the key."""
    refused: list[httpx.Response] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def call_for_ever(self) -> None:
        with self.served.client() as client:
            while not self.stopping.is_set():
                self.send(client, str(uuid4()))

    def send(self, client: httpx.Client, key: str) -> None:
        while True:
            answer = client.post("/v1/requests", json=self.served.question(), headers={"Idempotency-Key": key})
            if answer.status_code == 202:
                self.accepted[key] = answer.json()["id"]
                return
            assert answer.status_code in (409, 503), answer.text
            self.refused.append(answer)
            if self.stopping.wait(int(answer.headers["retry-after-ms"]) / 1_000):
                return


def test_nothing_accepted_is_lost_while_kafka_hangs(
    kafka: LocalStack, postgres: PostgresServer, redis_url: str, tmp_path: Path
) -> None:
    broker = kafka.endpoints.kafka_bootstrap_servers
    with serving(broker, postgres, tmp_path / "pipeline", redis_url=redis_url) as served:
        gateway = served.pipeline.processes["gateway-1"]
        traffic, pid = Traffic(served), gateway.pid
        with ThreadPoolExecutor(CALLERS) as pool:
            calls = [pool.submit(traffic.call_for_ever) for _ in range(CALLERS)]
            try:
                eventually(lambda: len(traffic.accepted) > AROUND, what="calls before the outage")
                stopped = psutil.Process(kafka.supervisor.kill("kafka", signal.SIGSTOP))
                began_ms, before = now_ms(), len(traffic.accepted)
                eventually(lambda: gateway.get("/health/ready")[0] == 503, what="that it is not ready")
                with served.client("b") as client:
                    refused = client.post("/v1/requests", json=served.question())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, UNAVAILABLE)
                assert int(refused.headers["retry-after"]) >= 1
                until_ms(began_ms + OUTAGE_MS)
                stopped.send_signal(signal.SIGCONT)
                eventually(
                    lambda: _all_run(served) and len(traffic.accepted) > before + CALLERS + AROUND,
                    2 * PATIENCE_S,
                    "calls after the outage",
                )
            finally:
                traffic.stopping.set()
            for call in calls:
                call.result(PATIENCE_S)
        assert gateway.pid == pid, "the gateway itself goes on"
        _check(served, traffic)


def _check(served: Served, traffic: Traffic) -> None:
    codes = {answer.json()["error"]["code"] for answer in traffic.refused}
    assert codes <= {UNAVAILABLE, UNCERTAIN, "request_in_flight", "overloaded", "no_capacity"}
    ids = set(traffic.accepted.values())
    assert len(ids) == len(traffic.accepted), "a key is a request"
    replies = Replies(served.pipeline.reader(GATEWAY_REPLIES), served.pipeline.codec)

    def answered() -> bool:
        _all_run(served)
        with suppress(AssertionError):
            return bool(replies.wait(ids, 1.0))
        return False

    eventually(answered, 2 * PATIENCE_S, "one final reply to each request that was accepted")
    with served.client() as client:
        some = sorted(ids)[:: max(1, len(ids) // 50)]
        eventually(
            lambda: all(client.get(f"/v1/results/{request_id}").status_code in (200, 429) for request_id in some),
            2 * PATIENCE_S,
            "the results of what was accepted",
        )


def _all_run(served: Served) -> bool:
    """A service whose transaction hung with the broker has ended by itself; nobody supervises it here."""
    for process in served.pipeline.processes.values():
        if not process.alive:
            process.start()
    return True
