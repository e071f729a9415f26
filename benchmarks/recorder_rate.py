"""recorder-rate: requests a second that the recorder stores, beside those that the stack answers, in the same run.

The stack answers requests in an open loop while no recorder runs. Then a recorder works off what that left in the log:
a reply, a usage event and an audit event for each request. Its rate counts from the first new rows to the last, so
without its start.
"""

from time import monotonic, perf_counter, sleep

import psycopg

from benchmarks.cluster import BenchStack, cluster
from benchmarks.loads import open_loop
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import QUESTION, UNBOUNDED_INSTANT_SERVICES, UNBOUNDED_TENANT, recorder
from fairlane import Client
from fairlane_server.postgres.connection import ALL_TENANTS, act_for

NAME = "recorder-rate"
HOW = MEDIAN_OF_REPETITIONS
AIM = 2.0
REQUESTS = 20_000
_TENANT = "acme"
_TENANTS = ({"tenant": _TENANT, **UNBOUNDED_TENANT},)
_RECORDER = recorder()
_LOOK_S = 0.25
_TIMEOUT_S = 300.0


def run() -> Result:
    """Three repetitions on one stack; one before them warms it up."""
    with (
        cluster(
            UNBOUNDED_INSTANT_SERVICES,
            parts=("kafka", "redis", "postgres"),
            tenants=_TENANTS,
        ) as running,
        Client(tenant=_TENANT, bootstrap_servers=running.settings.kafka_bootstrap_servers) as client,
        psycopg.connect(running.stack.endpoints.postgres_owner_dsn, autocommit=True) as database,
    ):

        def measure(_number: int) -> dict[str, float]:
            before = _rows(database)
            started = perf_counter()
            open_loop(client.submit_many(QUESTION for _ in range(REQUESTS)))
            answered_per_s = REQUESTS / (perf_counter() - started)
            stored_per_s = _stored_per_s(running, database, before)
            return {
                "answered_per_s": answered_per_s,
                "stored_per_s": stored_per_s,
                "ratio": stored_per_s / answered_per_s,
            }

        measure(0)
        runs = repeated(measure)
    return Result(
        NAME,
        (
            Figure("stored divided by answered", median_of(runs, "ratio"), "ratio", "at least", AIM),
            Figure("stored", median_of(runs, "stored_per_s"), "requests/s"),
            Figure("answered, without a recorder", median_of(runs, "answered_per_s"), "requests/s"),
        ),
        runs,
    )


def _stored_per_s(running: BenchStack, database: "psycopg.Connection[tuple[int]]", before: int) -> float:
    """Raises TimeoutError when not all are stored in time."""
    deadline = monotonic() + _TIMEOUT_S
    first: tuple[float, int] | None = None
    with running.service(_RECORDER):
        while (rows := _rows(database)) < before + REQUESTS:
            if monotonic() > deadline:
                raise TimeoutError(f"{rows - before} of {REQUESTS} are stored after {_TIMEOUT_S:g} s")
            if first is None and rows > before:
                first = perf_counter(), rows
            sleep(_LOOK_S)
        if first is None:
            raise RuntimeError(f"all {REQUESTS} were stored within {_LOOK_S:g} s: too few to measure")
        return (rows - first[1]) / (perf_counter() - first[0])


def _rows(database: "psycopg.Connection[tuple[int]]") -> int:
    with database.transaction():
        act_for(database, ALL_TENANTS)
        row = database.execute("SELECT count(*) FROM results").fetchone()
    return 0 if row is None else row[0]
