"""A tenant writes batches with the gateway's producer id to its own topic: the gateway goes on, for everybody.

Kafka takes any producer id from whoever may write a topic. After such a batch the broker refuses the gateway's next
record for this topic, and librdkafka may give its producer up for good.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fairlane.names import requests_topic
from tests.kit.forged_batches import forge, producer_ids
from tests.kit.gateway_kit import Served, serving
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.full, pytest.mark.broker]

HOSTILE, HONEST = "a", "b"
CALLS = 20


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pipeline")
    with serving(broker, postgres, folder, redis_url=redis_url, tenants=(HOSTILE, HONEST)) as served:
        yield served


@pytest.mark.parametrize(
    ("number", "epoch", "sequence"),
    [
        pytest.param(2, 0, 50, id="the producer ends"),
        pytest.param(3, 32_767, 0, id="its epoch is old"),
    ],
)
def test_every_call_is_answered_and_the_gateway_goes_on(
    broker: str, served: Served, number: int, epoch: int, sequence: int
) -> None:
    own, honest = (requests_topic(served.pipeline.tenant(tenant)) for tenant in (HOSTILE, HONEST))
    before = producer_ids(broker, honest)
    gateway = served.gateway(number)
    gateway.wait_ready()
    pid = gateway.pid
    assert call(served, number, HONEST) == 200
    (producer_id,) = producer_ids(broker, honest) - before
    assert forge(broker, own, (producer_id, epoch, sequence)) == 0, "Kafka takes it"
    with ThreadPoolExecutor(CALLS) as callers:
        tenants = [HONEST] * (CALLS // 2) + [HOSTILE] + [HONEST] * (CALLS // 2)
        statuses = list(callers.map(lambda tenant: call(served, number, tenant), tenants))
    assert statuses == [200] * len(tenants)
    assert len(lost(gateway)) == 1
    # As long as it runs it has no producer id that could be taken.
    assert forge(broker, own, (producer_id, 32_767, 0)) in {0, 47}
    assert [call(served, number, tenant) for tenant in (HOSTILE, HONEST)] == [200, 200]
    assert (gateway.alive, gateway.pid, len(lost(gateway))) == (True, pid, 1)


def call(served: Served, number: int, tenant: str) -> int:
    with served.client(tenant, number) as client:
        return client.post("/v1/chat/completions", json=served.chat()).status_code


def lost(gateway: ServiceProcess) -> list[dict[str, Any]]:
    return list(gateway.events("producer_id_lost"))
