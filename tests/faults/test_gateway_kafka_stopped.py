"""Kafka hangs under calls of the gateway: they are told to come again, and nothing accepted is lost or done twice."""

import signal
from collections.abc import Callable, Iterator

import psutil
import pytest

from deploy.local.stack import LocalStack
from fairlane.clock import now_ms
from producers.gateway.errors import UNAVAILABLE
from producers.gateway.idempotency import IN_FLIGHT
from producers.gateway.reply_errors import UNCERTAIN
from tests.faults.gateway_traffic import BUSY, Traffic, check_promise
from tests.integration.gateway_kit import Served, serving
from tests.stack import PostgresServer
from tests.waiting import eventually, until_ms

pytestmark = pytest.mark.broker

PASSING = BUSY | {UNAVAILABLE, UNCERTAIN, IN_FLIGHT}


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A broker that these tests alone use."""
    with LocalStack(data_dir=tmp_path_factory.mktemp("kafka"), parts=("kafka",), environ={}) as stack:
        yield stack
        stack.supervisor.request_stop(now=True)


@pytest.fixture(scope="module")
def served(
    kafka: LocalStack, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pipeline")
    with serving(kafka.endpoints.kafka_bootstrap_servers, postgres, folder, redis_url=redis_url) as served:
        yield served


@pytest.mark.parametrize(
    ("outage_ms", "around"),
    [(5_000, 20), pytest.param(20_000, 100, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_nothing_accepted_is_lost_while_kafka_hangs(
    kafka: LocalStack, served: Served, say: Callable[[str], None], outage_ms: int, around: int
) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    with Traffic(served, passing=PASSING) as traffic:
        traffic.wait_more(around, "calls before the outage")
        say(f"Kafka hangs after {len(traffic.ids)} requests")
        stopped = psutil.Process(kafka.supervisor.kill("kafka", signal.SIGSTOP))
        began_ms = now_ms()
        try:
            traffic.wait(lambda: gateway.get("/health/ready")[0] == 503, "that it is not ready")
            with served.client("b") as client:
                refused = client.post("/v1/requests", json=served.question())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, UNAVAILABLE)
            assert int(refused.headers["retry-after"]) >= 1
            until_ms(began_ms + outage_ms)
        finally:
            stopped.send_signal(signal.SIGCONT)
        say(f"Kafka is back; {len(traffic.refused)} refusals")
        eventually(lambda: gateway.get("/health/ready")[0] == 200, what="that it is ready")
        traffic.wait_more(around, "calls after the outage")
    assert gateway.pid == pid, "the gateway itself goes on"
    say(f"{len(traffic.ids)} requests, {len(traffic.refused)} refusals")
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in traffic.refused)
    check_promise(served, traffic.ids)
