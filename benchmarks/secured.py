"""secured: the whole stack with TLS, passwords and ACLs on Kafka, beside the same stack without.

The work is none (an engine that takes no time), and Java runs both brokers with the same options. Both stacks run all
the time and are asked in turn by the same loads, so that whatever else the machine does hits both alike; the one that
is not asked costs the other some of the processors.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from time import perf_counter

from benchmarks.cluster import BenchStack, cluster
from benchmarks.loads import Pending, from_callers, one_at_a_time, open_loop
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import QUESTION, UNBOUNDED_INSTANT_SERVICES, UNBOUNDED_TENANT
from fairlane import Client
from fairlane_server.access.users import KafkaUser
from fairlane_server.topics.families import KafkaRole

NAME = "secured"
HOW = MEDIAN_OF_REPETITIONS
AIM = 0.85
WARM_UP = 10_000
ALONE, TOGETHER, OPEN = 200, 6_000, 10_000
_TENANT = "acme"
_TENANTS = ({"tenant": _TENANT, **UNBOUNDED_TENANT},)
_USER = KafkaUser(KafkaRole.TENANT, _TENANT).name


def run() -> Result:
    """Three repetitions; each load goes to the plaintext stack and then to the secured one."""
    with ExitStack() as running:
        clients = {
            name: running.enter_context(_client(running.enter_context(_stack(secured=name == "secured"))))
            for name in ("plaintext", "secured")
        }
        for client in clients.values():
            open_loop(_many(client, WARM_UP))

        def measure(_number: int) -> dict[str, float]:
            found = {}
            for load, figure in _LOADS.items():
                for name, client in clients.items():
                    found[f"{name}_{load}"] = figure(client)
            return found

        runs = repeated(measure)
    return Result(NAME, tuple(_figures(runs)), runs)


def _stack(*, secured: bool) -> AbstractContextManager[BenchStack]:
    return cluster(UNBOUNDED_INSTANT_SERVICES, tenants=_TENANTS, secured=secured, both_compilers=True)


def _client(running: BenchStack) -> Client:
    return Client(_TENANT, settings=running.stack.endpoints.kafka_settings(_USER))


def _many(client: Client, requests: int) -> Iterable[Pending]:
    return client.submit_many(QUESTION for _ in range(requests))


def _open_per_s(client: Client) -> float:
    started = perf_counter()
    open_loop(_many(client, OPEN))
    return OPEN / (perf_counter() - started)


def _callers_per_s(client: Client) -> float:
    started = perf_counter()
    return len(from_callers(lambda: client.submit(**QUESTION), TOGETHER)) / (perf_counter() - started)


def _alone_p50_ms(client: Client) -> float:
    return median(one_at_a_time(lambda: client.submit(**QUESTION), ALONE))


_LOADS: dict[str, Callable[[Client], float]] = {
    "open_per_s": _open_per_s,
    "callers_per_s": _callers_per_s,
    "alone_p50_ms": _alone_p50_ms,
}
_TITLES = {
    "open_per_s": ("as fast as the window allows", "requests/s"),
    "callers_per_s": ("from 32 callers", "requests/s"),
    "alone_p50_ms": ("one at a time, median", "ms"),
}


def _figures(runs: tuple[dict[str, float], ...]) -> Iterator[Figure]:
    for load, (title, unit) in _TITLES.items():
        plaintext, secured = median_of(runs, f"plaintext_{load}"), median_of(runs, f"secured_{load}")
        yield Figure(f"{title}, plaintext", plaintext, unit)
        yield Figure(f"{title}, secured", secured, unit)
        ratio = plaintext / secured if unit == "ms" else secured / plaintext
        yield Figure(f"{title}: secured as a part of plaintext", ratio, "ratio", "at least", AIM)
