"""Programs of ``peers``, in an environment of their own: a worker of each peer, and the loads that ask it.

``python -m benchmarks.peer_programs worker PEER REDIS_URL PORT`` answers until it is killed.
``python -m benchmarks.peer_programs load PEER REDIS_URL PORT LOAD REQUESTS`` sends and prints a line of JSON. ``kills``
is a load of its own: it sends at a steady rate, and each task is counted in Redis when it runs.

The task is none: it returns its text. Every peer is set up to lose as little as it can: tasks are acknowledged after
they ran, and those of a dead worker are delivered again after ``REDELIVER_S``.
"""

import http.client
import json
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any, Protocol
from uuid import uuid4

from redis import Redis
from redis.exceptions import ResponseError

from benchmarks.loads import CALLERS, Pending, from_callers, one_at_a_time, open_loop

REDELIVER_S = 5
SENT_PER_S = 100
_TEXT = "What is the capital of France?"
_EXPIRES_S = 600
_WORKERS = 2
_WAIT_S = 60.0
_STREAM, _GROUP, _RUNS = "peer-tasks", "peer-workers", "peer-runs"
_POLL_MS = 100
_BATCH = 200


class Peer(Protocol):
    """One way to have tasks done by another process."""

    def work(self) -> None:
        """Answer tasks, for ever."""

    def submit(self, text: str) -> Pending:
        """Send a task. Any thread."""


def counted(redis: Any, text: str) -> str:
    """The task: the text, counted first if its sender numbers it."""
    if text.startswith("#"):
        redis.hincrby(_RUNS, text, 1)
    return text


class Celery:
    """Celery with Redis as broker and result backend, two worker processes."""

    def __init__(self, url: str, _port: int) -> None:
        self._url = url
        self._local = threading.local()
        self._lock = threading.Lock()

    def _app(self) -> Any:
        # An application for each thread: its results share a subscription, which is for one thread.
        found = getattr(self._local, "app", None)
        if found is None:
            # Its making is for one thread as well.
            with self._lock:
                found = self._local.app = self._made()
        return found

    def _made(self) -> Any:
        import celery

        redis = Redis.from_url(self._url)
        app = celery.Celery("peer", broker=self._url, backend=self._url)
        app.conf.update(
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            result_expires=_EXPIRES_S,
            broker_transport_options={"visibility_timeout": REDELIVER_S},
        )

        def answer(text: str) -> str:
            return counted(redis, text)

        task = app.task(name="peer.answer")(answer)
        app.finalize()
        return app, task

    def work(self) -> None:
        app, _ = self._app()
        app.worker_main(["worker", f"--concurrency={_WORKERS}", "--loglevel=ERROR", "--without-mingle"])

    def submit(self, text: str) -> Pending:
        _, task = self._app()
        sent = task.delay(text)

        @dataclass
        class Sent:
            def result(self, timeout: float) -> Any:
                return sent.get(timeout=timeout, interval=0.01)

        return Sent()


class Dramatiq:
    """dramatiq with Redis as broker and result backend, eight threads in one process."""

    def __init__(self, url: str, _port: int) -> None:
        import dramatiq
        from dramatiq.brokers.redis import RedisBroker
        from dramatiq.results import Results
        from dramatiq.results.backends import RedisBackend

        redis = Redis.from_url(url)
        self._broker = RedisBroker(url=url, heartbeat_timeout=REDELIVER_S * 1_000, maintenance_chance=1_000)
        self._results = RedisBackend(url=url)
        self._broker.add_middleware(Results(backend=self._results, result_ttl=_EXPIRES_S * 1_000))
        self._actor = dramatiq.actor(
            lambda text: counted(redis, text), actor_name="answer", broker=self._broker, store_results=True
        )

    def work(self) -> None:
        import dramatiq

        worker = dramatiq.Worker(self._broker)
        worker.start()
        threading.Event().wait()

    def submit(self, text: str) -> Pending:
        sent, results = self._actor.send(text), self._results

        @dataclass
        class Sent:
            def result(self, timeout: float) -> Any:
                return sent.get_result(backend=results, block=True, timeout=round(timeout * 1_000))

        return Sent()


class Streams:
    """Redis Streams by hand: a consumer group; answer and acknowledgement in one MULTI."""

    def __init__(self, url: str, _port: int) -> None:
        self._redis: Any = Redis.from_url(url)

    def work(self) -> None:
        # It exists if a worker ran before.
        with suppress(ResponseError):
            self._redis.xgroup_create(_STREAM, _GROUP, id="0", mkstream=True)
        me = uuid4().hex
        while True:
            self._answer(self._redis.xautoclaim(_STREAM, _GROUP, me, REDELIVER_S * 1_000, count=_BATCH)[1])
            for _ in range(_BATCH):
                found = self._redis.xreadgroup(_GROUP, me, {_STREAM: ">"}, count=_BATCH, block=_POLL_MS)
                if not found:
                    break
                self._answer(found[0][1])

    def _answer(self, entries: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> None:
        with self._redis.pipeline(transaction=True) as pipeline:
            for entry_id, fields in entries:
                key = b"peer-reply:" + fields[b"id"]
                pipeline.rpush(key, counted(self._redis, fields[b"text"].decode()))
                pipeline.expire(key, _EXPIRES_S)
                pipeline.xack(_STREAM, _GROUP, entry_id)
                pipeline.xdel(_STREAM, entry_id)
            pipeline.execute()

    def submit(self, text: str) -> Pending:
        task_id = uuid4().hex
        self._redis.xadd(_STREAM, {"id": task_id, "text": text})
        redis = self._redis

        @dataclass
        class Sent:
            def result(self, timeout: float) -> Any:
                found = redis.blpop([f"peer-reply:{task_id}"], timeout)
                if found is None:
                    raise TimeoutError
                return found

        return Sent()


class Http:
    """FastAPI under uvicorn, without a queue: a call is lost with its server."""

    def __init__(self, url: str, port: int) -> None:
        self._url = url
        self._port = port
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(CALLERS)

    def work(self) -> None:
        import uvicorn
        from fastapi import FastAPI
        from pydantic import BaseModel

        class Body(BaseModel):
            text: str

        redis, app = Redis.from_url(self._url), FastAPI()

        @app.post("/answer")
        async def answer(body: Body) -> Body:
            return Body(text=counted(redis, body.text))

        uvicorn.run(app, host="127.0.0.1", port=self._port, access_log=False, log_level="error")

    def submit(self, text: str) -> "Future[Any]":
        return self._threads.submit(self._call, text)

    def _call(self, text: str) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_WAIT_S)
        try:
            connection.request("POST", "/answer", json.dumps({"text": text}), {"Content-Type": "application/json"})
            return connection.getresponse().read()
        except OSError:
            connection.close()
            raise


PEERS: dict[str, Callable[[str, int], Peer]] = {
    "celery": Celery,
    "dramatiq": Dramatiq,
    "redis-streams": Streams,
    "fastapi": Http,
}


def measure(submit: Callable[[str], Pending], load: str, requests: int) -> dict[str, float]:
    """Rate, median latency where the load waits for each answer, and processor time of this process for a request."""
    latencies_ms: list[float] = []

    def one() -> Pending:
        return submit(_TEXT)

    started, used_s = perf_counter(), process_time()
    if load == "open":
        open_loop(one() for _ in range(requests))
    else:
        latencies_ms = (one_at_a_time if load == "alone" else from_callers)(one, requests)
    took_s = perf_counter() - started
    return {
        "per_s": requests / took_s,
        "p50_ms": median(latencies_ms) if latencies_ms else 0.0,
        "client_us": (process_time() - used_s) / requests * 1e6,
    }


def lost_under_kills(submit: Callable[[str], Pending], requests: int) -> int:
    """Tasks without an answer. One that cannot even be sent is lost too: its sender was told so."""
    sent: list[Pending] = []
    for number in range(requests):
        sleep(1 / SENT_PER_S)
        try:
            sent.append(submit(f"#{number}"))
        except OSError:
            continue
    lost, waits_s = requests - len(sent), _WAIT_S
    for pending in sent:
        started = perf_counter()
        try:
            pending.result(max(0.05, waits_s))
        except Exception:  # noqa: BLE001 - each peer has its own error for an answer that does not come
            lost += 1
        waits_s -= perf_counter() - started
    return lost


def main(program: str, name: str, url: str, port: str, load: str = "", requests: str = "0") -> None:
    peer = PEERS[name](url, int(port))
    if program == "worker":
        peer.work()
    elif load == "kills":
        lost = lost_under_kills(peer.submit, int(requests))
        runs = Redis.from_url(url).hgetall(_RUNS)
        print(json.dumps({"lost": lost, "twice": sum(int(count) > 1 for count in runs.values())}))
    else:
        print(json.dumps(measure(peer.submit, load, int(requests))))


if __name__ == "__main__":
    main(*sys.argv[1:])
