"""peers: the same work that takes no time through what people would use instead, side by side with Fairlane.

Celery and dramatiq with Redis, Redis Streams by hand, and a bare FastAPI route: rate in an open loop, rate and latency
from 32 callers, latency of a lone request, and processor time of a request in all processes. They run one after the
other; Fairlane's stack idles while the others are asked. At last each worker is killed ten times under a steady load:
how many tasks get no answer, and how many run twice. Fairlane's part of the kills is the consumer, which the stack
restarts.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import sleep

from redis import Redis

from benchmarks.cluster import BenchStack, cluster, wait_until
from benchmarks.peer_programs import PEERS, SENT_PER_S, lost_under_kills, measure
from benchmarks.processes import cpu_with_children_s
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import INSTANT_SERVICES, MODEL
from deploy.local.ports import PortClaims
from fairlane import Client

NAME = "peers"
HOW = MEDIAN_OF_REPETITIONS
PYTHON = Path(".venv-peers/bin/python")
KILLS = 10
KILL_EVERY_S = 3.0
REQUESTS = {"open": 4_000, "callers": 3_200, "alone": 200}
_WARM_UP = 500
_FAIRLANE = "fairlane"
_TENANT = "acme"
_READY_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 300.0
_AIMS = {("open", "celery"): 3.0, ("open", "dramatiq"): 1.2, ("callers", "celery"): 3.0, ("callers", "dramatiq"): 0.8}

Measure = Callable[[str, int], dict[str, float]]
"""By load and number of requests: rate, median latency, and processor time of the client."""


class PeersMissingError(Exception):
    """There is no environment of the peers."""


def run() -> Result:
    """Three repetitions of the loads; one run of the kills. Raises PeersMissingError."""
    if not PYTHON.exists():
        make = f"python -m venv {PYTHON.parents[1]} && {PYTHON} -m pip install -r requirements/peers.txt"
        raise PeersMissingError(f"{PYTHON} is missing: {make}")
    with (
        cluster(INSTANT_SERVICES, parts=("kafka", "redis"), tenants=(_TENANT,)) as running,
        Client(tenant=_TENANT, bootstrap_servers=running.settings.kafka_bootstrap_servers) as client,
    ):

        def ours(load: str, requests: int) -> dict[str, float]:
            return measure(lambda text: client.submit(model=MODEL, prompt=text, max_tokens=16), load, requests)

        def once(_number: int) -> dict[str, float]:
            found = _loads(_FAIRLANE, ours, lambda: _used_s(running))
            for name in PEERS:
                with _peer(running, name) as (peer, worker):
                    found |= _loads(name, peer, lambda worker=worker: _used_s(running, worker))  # type: ignore[misc]
            return found

        runs = repeated(once)
        kills = {_FAIRLANE: _kills_of_ours(running, client)} | {name: _kills(running, name) for name in PEERS}
    return Result(NAME, tuple(_figures(runs, kills)), runs)


def _figures(runs: tuple[dict[str, float], ...], kills: dict[str, dict[str, float]]) -> Iterator[Figure]:
    names = (_FAIRLANE, *PEERS)
    for load, text in (("open", "open loop"), ("callers", "32 callers")):
        for name in PEERS:
            aim = _AIMS.get((load, name))
            ratio = median_of(runs, f"{_FAIRLANE}_{load}_per_s") / median_of(runs, f"{name}_{load}_per_s")
            yield Figure(f"rate divided by {name}'s, {text}", ratio, "ratio", None if aim is None else "at least", aim)
        for name in names:
            yield Figure(f"{name}, {text}", median_of(runs, f"{name}_{load}_per_s"), "requests/s")
            yield Figure(f"{name}, {text}, processor time", median_of(runs, f"{name}_{load}_cpu_us"), "us a request")
    for name in names:
        yield Figure(f"{name}, one at a time", median_of(runs, f"{name}_alone_p50_ms"), "ms")
    for name in names:
        yield Figure(f"{name}, without an answer after {KILLS} kills", kills[name]["lost"], "requests")
        if "twice" in kills[name]:
            yield Figure(f"{name}, run twice", kills[name]["twice"], "requests")


def _loads(name: str, ask: Measure, used_s: Callable[[], float]) -> dict[str, float]:
    ask("open", _WARM_UP)
    found: dict[str, float] = {}
    for load, requests in REQUESTS.items():
        before = used_s()
        measured = ask(load, requests)
        found[f"{name}_{load}_per_s"] = measured["per_s"]
        found[f"{name}_{load}_p50_ms"] = measured["p50_ms"]
        found[f"{name}_{load}_cpu_us"] = (used_s() - before) / requests * 1e6 + measured["client_us"]
    return found


def _used_s(running: BenchStack, worker: int | None = None) -> float:
    """Processor time so far of a peer's worker and Redis, or else of the stack."""
    views = [view for view in running.stack.supervisor.processes() if view.pid is not None]
    ours = [view for view in views if worker is None or view.name == "redis"]
    pids = [*(view.pid for view in ours if view.pid is not None), *([] if worker is None else [worker])]
    return sum(map(cpu_with_children_s, pids))


@contextmanager
def _peer(running: BenchStack, name: str) -> Iterator[tuple[Measure, int]]:
    """A running worker: how to ask it, and its process id."""
    with closing(PortClaims()) as ports:
        port = str(ports.take(name))
        given = (name, running.stack.endpoints.redis_url, port)
        worker = _start("worker", *given)
        try:

            def ask(load: str, requests: int) -> dict[str, float]:
                found: dict[str, float] = json.loads(_output("load", *given, load, str(requests)))
                return found

            wait_until(lambda: _answers(ask), _READY_TIMEOUT_S, f"the worker of {name}")
            yield ask, worker.pid
        finally:
            _end(worker)


def _kills(running: BenchStack, name: str) -> dict[str, float]:
    redis = Redis.from_url(running.stack.endpoints.redis_url)
    redis.delete("peer-runs")
    with closing(PortClaims()) as ports:
        given = (name, running.stack.endpoints.redis_url, str(ports.take(name)))
        worker = _start("worker", *given)
        sleep(KILL_EVERY_S)
        seconds = (KILLS + 1) * KILL_EVERY_S
        load = subprocess.Popen(
            [str(PYTHON), "-m", "benchmarks.peer_programs", "load", *given, "kills", str(round(seconds * SENT_PER_S))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(KILLS):
                sleep(KILL_EVERY_S)
                _end(worker)
                worker = _start("worker", *given)
            output, _ = load.communicate(timeout=_LOAD_TIMEOUT_S)
        finally:
            load.kill()
            _end(worker)
    found: dict[str, float] = json.loads(output)
    return found


def _kills_of_ours(running: BenchStack, client: Client) -> dict[str, float]:
    lost: list[int] = []
    requests = round((KILLS + 1) * KILL_EVERY_S * SENT_PER_S)
    load = threading.Thread(
        target=lambda: lost.append(
            lost_under_kills(lambda text: client.submit(model=MODEL, prompt=text, max_tokens=16), requests)
        )
    )
    load.start()
    for _ in range(KILLS):
        sleep(KILL_EVERY_S)
        running.stack.supervisor.kill("consumer-1", signal.SIGKILL)
    load.join(_LOAD_TIMEOUT_S)
    return {"lost": lost[0]}


def _answers(ask: Measure) -> bool:
    try:
        ask("alone", 1)
    except subprocess.CalledProcessError:
        return False
    return True


def _start(*arguments: str) -> "subprocess.Popen[bytes]":
    command = [str(PYTHON), "-m", "benchmarks.peer_programs", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def _output(*arguments: str) -> bytes:
    """Raises CalledProcessError."""
    command = [str(PYTHON), "-m", "benchmarks.peer_programs", *arguments]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=_LOAD_TIMEOUT_S
    ).stdout


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """SIGKILL to the worker and its children, which are a process group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
