"""Postgres hangs, or goes away, under calls of the gateway: whoever is known of late sends work and is answered, what
must be looked up is refused for a while and never denied, and afterwards every result is there."""

from collections.abc import Callable, Iterator
from uuid import uuid4

import httpx
import pytest

from fairlane.clock import now_ms
from fairlane_server.api_keys.key_store import ApiKeys
from producers.openai_api.errors import UNAVAILABLE
from tests.kit.gateway_kit import Served, serving
from tests.kit.gateway_traffic import Traffic, check_promise, degraded
from tests.kit.own_postgres import OwnPostgres
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(900)]

AROUND = 20
"""Calls of each kind that succeed before the outage, in it, and after it."""


@pytest.fixture(scope="module")
def postgres_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPostgres]:
    with OwnPostgres(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="module")
def served(
    broker: str, postgres_of_its_own: OwnPostgres, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pipeline")
    with serving(broker, postgres_of_its_own.server, folder, redis_url=redis_url) as served:
        yield served


@pytest.mark.parametrize("fault", ["hung", "gone"])
@pytest.mark.parametrize("outage_ms", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_work_goes_on_without_postgres(
    served: Served, postgres_of_its_own: OwnPostgres, say: Callable[[str], None], fault: str, outage_ms: int
) -> None:
    gateway = served.pipeline.processes["gateway-1"]
    pid = gateway.pid
    with ApiKeys(served.database.owner_dsn) as keys:
        stranger = keys.create(served.pipeline.tenant("b"), "not used before the outage").text

    def asked_as(key: str) -> httpx.Response:
        return client.get("/v1/models", headers={"authorization": f"Bearer {key}"})

    with Traffic(served) as traffic, served.client() as client:
        traffic.wait_more(AROUND, "calls before the outage")
        before = traffic.ids
        say(f"Postgres {fault} after {len(before)} requests")
        postgres_of_its_own.begin(fault)
        began_ms = now_ms()
        try:
            # Nobody has looked anything up yet.
            eventually(lambda: degraded(served) == {"postgres"}, what="that it says what is missing")
            for path in (f"/v1/results/{uuid4()}", f"/v1/requests/{uuid4()}"):
                refused = client.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, UNAVAILABLE), refused.text
                assert int(refused.headers["retry-after"]) >= 1
            unknown = asked_as(stranger)
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "identity_unavailable")
            traffic.wait_more(AROUND, "calls without Postgres")
            told = {client.get(f"/v1/results/{request_id}").status_code for request_id in traffic.ids - before}
            assert told <= {200, 503}
            until_ms(began_ms + outage_ms)
            say(f"without Postgres {len(traffic.ids)} requests")
            assert degraded(served) == {"postgres"}
        finally:
            postgres_of_its_own.end()
        say("Postgres is back")
        eventually(lambda: degraded(served) == set(), what="that nothing is missing")
        eventually(lambda: asked_as(stranger).is_success, what="that whoever has a key is known")
        traffic.wait_more(AROUND, "calls after the outage")
    assert gateway.pid == pid
    say(f"{len(traffic.ids)} requests, {len(traffic.refused)} refused for a while")
    check_promise(served, traffic.ids)
