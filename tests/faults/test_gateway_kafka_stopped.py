"""Kafka hangs, or goes away, under calls of the gateway: they are told to come again, and nothing accepted is lost or
done twice."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest

from fairlane.clock import now_ms
from producers.openai_api.errors import UNAVAILABLE, UNCERTAIN
from tests.kit.gateway_kit import Served, serving
from tests.kit.gateway_traffic import CALLERS, Traffic, check_promise
from tests.kit.own_part import START_S, OwnPart
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPart]:
    """A broker that these tests alone use."""
    with OwnPart("kafka", tmp_path_factory.mktemp("kafka")) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def served(
    kafka: OwnPart, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pipeline")
    with serving(kafka.endpoints.kafka_bootstrap_servers, postgres, folder, redis_url=redis_url) as served:
        yield served


def health(gateway: ServiceProcess) -> int:
    """What it says of itself; asked again when it has no time to."""
    statuses: list[int] = []

    def says() -> bool:
        with suppress(OSError):
            statuses.append(gateway.get("/health/ready")[0])
        return bool(statuses)

    eventually(says, what="an answer of the gateway")
    return statuses[0]


@pytest.mark.parametrize("fault", ["hung", "gone"])
@pytest.mark.parametrize(
    ("outage_ms", "around"),
    [(5_000, 20), pytest.param(20_000, 100, marks=pytest.mark.long)],
)
def test_nothing_accepted_is_lost_without_kafka(
    kafka: OwnPart, served: Served, say: Callable[[str], None], fault: str, outage_ms: int, around: int
) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid

    def refused() -> httpx.Response:
        with served.client("b") as client:
            answer = client.post("/v1/requests", json=served.question())
        # Now and then one is let through, to see whether it comes back: nobody knows what becomes of it.
        assert (answer.status_code, answer.json()["error"]["code"]) in {(503, UNAVAILABLE), (503, UNCERTAIN)}
        assert int(answer.headers["retry-after"]) >= 1
        return answer

    with Traffic(served) as traffic:
        traffic.wait_more(around, "calls before the outage")
        say(f"Kafka {fault} after {len(traffic.ids)} requests")
        kafka.begin(fault)
        began_ms, accepted = now_ms(), len(traffic.sent)
        try:
            # The callers may all be waiting for answers, and only a call that publishes shows what Kafka does.
            refused()
            traffic.wait(lambda: health(gateway) == 503, "that it is not ready")
            eventually(lambda: refused().json()["error"]["code"] == UNAVAILABLE, what="a certain refusal")
            until_ms(began_ms + outage_ms)
            refused()
            assert health(gateway) == 503
            # Those whose acknowledgement was on its way.
            assert len(traffic.sent) <= accepted + CALLERS
            say(f"{len(traffic.refused)} refusals")
        finally:
            kafka.end()
        say(f"Kafka is back after {(now_ms() - began_ms) / 1_000:.1f} s; {len(traffic.refused)} refusals")
        eventually(lambda: health(gateway) == 200, START_S, "that it is ready")
        say("the gateway is ready")
        traffic.wait_more(around, "calls after the outage", START_S)
    assert gateway.pid == pid, "the gateway itself goes on"
    say(f"{len(traffic.ids)} requests, {len(traffic.refused)} refusals")
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in traffic.refused)
    check_promise(served, traffic.ids)
