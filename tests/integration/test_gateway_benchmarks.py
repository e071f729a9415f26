"""The benchmarks of the gateway, in short: that they run on real parts and see what they must, not how good it is."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from benchmarks import edge, gateway, http_load, sync_call
from benchmarks.cluster import BenchStack, HttpService, cluster
from benchmarks.http_load import Order
from benchmarks.processes import cpu_s
from benchmarks.simulated_pool import INSTANT_SERVICES
from tests.kit.nginx_kit import needs_nginx

pytestmark = [pytest.mark.full, pytest.mark.broker]


@pytest.fixture(scope="module")
def running() -> Iterator[BenchStack]:
    """What both want, since its start takes most of a short run."""
    with cluster(
        INSTANT_SERVICES,
        parts=("kafka", "redis", "postgres"),
        tenants=(gateway.TENANT,),
        topics=(gateway.BARE_TOPIC,),
    ) as one:
        yield one


@pytest.fixture(scope="module")
def served(running: BenchStack) -> Iterator[HttpService]:
    with running.gateway(gateway.TENANT) as one:
        yield one


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, running: BenchStack, served: HttpService) -> None:
    for module in (gateway, sync_call, edge):
        monkeypatch.setattr(module, "repeated", lambda measure: (measure(0),))
        monkeypatch.setattr(module, "cluster", lambda *_arguments, **_options: nullcontext(running))
    monkeypatch.setattr(BenchStack, "gateway", lambda *_arguments: nullcontext(served))
    for module in (gateway, edge):
        monkeypatch.setattr(module, "SECONDS", 1.0)
        monkeypatch.setattr(module, "WARM_UP_S", 0.2)
        monkeypatch.setattr(module, "CONNECTIONS", 8)
    monkeypatch.setattr(edge, "IDLE", 20)
    monkeypatch.setattr(sync_call, "CALLS", 5)
    monkeypatch.setattr(sync_call, "WARM_UP", 1)


def test_gateway_divides_its_rate_by_the_bare_routes() -> None:
    result = gateway.run()
    [run] = result.runs

    aims = [(figure.unit, figure.bound, figure.aim) for figure in result.figures if figure.aim is not None]
    assert aims == [
        ("ratio", "at least", 1.0),
        ("requests/s", "at least", 1_000),
        ("ms", "at most", 10),
        ("ms", "at most", 50),
        ("ratio", "at least", 1.7),
    ]
    assert run["workers_ratio"] > 0
    assert run["ratio"] == pytest.approx(run["gateway_per_s"] / run["bare_per_s"])
    assert 0 < run["p50_ms"] <= run["p99_ms"]
    assert run["gateway_us"] > 0
    assert run["load_us"] > 0


@needs_nginx
def test_edge_has_the_same_calls_with_and_without_it() -> None:
    run, idle = edge.run().runs

    assert run["ratio"] == pytest.approx(run["edge_per_s"] / run["gateway_per_s"])
    assert run["added_ms"] == pytest.approx(run["edge_p50_ms"] - run["gateway_p50_ms"])
    assert run["edge_us"] > 0
    assert idle["callers"] == 20
    assert idle["edge_bytes"] > 0


def test_sync_call_takes_the_sdks_own_time_away() -> None:
    [run] = sync_call.run().runs

    assert run["beyond_ms"] == pytest.approx(run["gateway_ms"] - run["sdk_ms"])
    assert 0 < run["sdk_ms"] <= run["sdk_p99_ms"]
    assert 0 < run["gateway_ms"] <= run["gateway_p99_ms"]


def test_a_load_that_is_not_accepted_is_no_figure(served: HttpService) -> None:
    measured = http_load.load(Order(served.url, gateway.PATH, served.headers, "{}", 0.2, connections=2))
    assert set(measured.statuses) == {"400"}
    assert measured.others > 0
    assert measured.per_s == 0
    assert cpu_s(served.pid) > 0

    with pytest.raises(RuntimeError, match="not every call was accepted"):
        gateway.loaded(gateway.Side("gateway", "/nowhere", served), 0.2, rate_per_s=50)
