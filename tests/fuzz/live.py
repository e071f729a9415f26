"""Hostile records and calls against real processes, while another tenant's honest requests run beside them.

One tenant writes what it likes to its topic and sends what it likes to the gateway. At the end every process is the one
that was started, nothing was answered with 500, the partition was read to its end, both tenants are served, and every
honest request was answered.
"""

import base64
import json
import socket
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from benchmarks.processes import peak_bytes
from benchmarks.record_batches import ProduceRefusedError, produce_batch
from fairlane.kafka_config import connection
from fairlane.names import requests_topic
from fairlane.outcomes import Outcome as ReplyOutcome
from tests.fuzz import corpus, hostile_calls, hostile_records
from tests.fuzz.report import Outcome
from tests.kit.gateway_kit import Served, serving
from tests.kit.stack import choose_stack
from tests.kit.waiting import eventually

HOSTILE, HONEST = "a", "b"
KINDS = (*hostile_records.KINDS, *hostile_calls.KINDS)
GATEWAY_ENV = {"GATEWAY_WAIT_S": "20"}
"""Of the gateway that is attacked: it answers within the time that is waited for here."""
_ANSWER_TIMEOUT_S = 60.0
_SOCKET_TIMEOUT_S = 0.3
_DRAIN_TIMEOUT_S = 120.0
_FLUSH_TIMEOUT_S = 30.0
_MOST_ANSWER_BYTES = 1_000_000
_KEPT_ACTIONS = 400
_MOST_MIB = 1_024
"""Below the limits of the containers of dispatcher and gateway in docker-compose.yml."""

Action = Mapping[str, Any]


@contextmanager
def stack(folder: Path) -> Iterator[Served]:
    """Kafka, Postgres, Redis, a gateway, a dispatcher, a consumer and a recorder of its own."""
    with ExitStack() as parts:
        servers = choose_stack()
        parts.callback(servers.close)
        yield parts.enter_context(
            serving(
                servers.kafka(),
                servers.postgres(),
                folder,
                redis_url=servers.redis(),
                gateway_env=GATEWAY_ENV,
                tenants=(HOSTILE, HONEST),
            )
        )


def run(seconds: float, seed: int, kinds: Sequence[str], replay: Path | None = None) -> Outcome:
    """Start everything, attack it for so long with these kinds of actions, and look at what is left."""
    with tempfile.TemporaryDirectory(prefix="fairlane-fuzz-") as folder, stack(Path(folder)) as served:
        return attack(served, seconds, seed, kinds, replay)


def attack(served: Served, seconds: float, seed: int, kinds: Sequence[str], replay: Path | None = None) -> Outcome:
    """The same on what runs already; its tenants are ``HOSTILE`` and ``HONEST``."""
    attacker = _Attacker(served)
    pids = {name: process.pid for name, process in served.pipeline.processes.items()}
    began = time.monotonic()
    reason: str | None = None
    with _Honest(served) as honest:
        try:
            if replay is None:
                _until(began + seconds, attacker, honest, pids, Random(seed), frozenset(KINDS) - set(kinds))
            else:
                for line in replay.read_text(encoding="utf-8").splitlines():
                    attacker.do(json.loads(line))
        except AssertionError as error:
            reason = str(error)
    if reason is None:
        reason = _broken(lambda: _look(served, pids, honest))
    taken_s = time.monotonic() - began
    figures = {**attacker.figures(), **honest.figures(), **_memory_mib(pids)}
    if reason is None:
        too_large = [name for name, mib in _memory_mib(pids).items() if "consumer" not in name and mib > _MOST_MIB]
        reason = f"more than {_MOST_MIB} MiB: {', '.join(too_large)}" if too_large else None
    attacker.close()
    if reason is None:
        return Outcome("live", attacker.done, taken_s, figures=figures)
    content = "\n".join(json.dumps(action) for action in attacker.last).encode()
    file = replay or corpus.keep("live", content)
    return Outcome("live", attacker.done, taken_s, reason, file, f"python -m tests.fuzz --input {file}", figures)


def _until(
    end_s: float,
    attacker: "_Attacker",
    honest: "_Honest",
    pids: Mapping[str, int],
    rng: Random,
    without: frozenset[str],
) -> None:
    pipeline = attacker.served.pipeline
    model = pipeline.model_for("generate")
    has_kafka = not without >= set(hostile_records.KINDS)
    has_http = not without >= set(hostile_calls.KINDS)
    while time.monotonic() < end_s:
        if has_kafka:
            attacker.do(hostile_records.action(rng, pipeline.request(prompt="hello"), without))
        if has_http:
            attacker.do(hostile_calls.action(rng, model, without))
        _check_alive(attacker.served, pids)
        honest.check()


def _look(served: Served, pids: Mapping[str, int], honest: "_Honest") -> None:
    """What must hold afterwards. Raises AssertionError."""
    pipeline = served.pipeline
    _check_alive(served, pids)
    honest.check()
    replies = pipeline.replies(HONEST)
    answered = replies.wait(honest.published, _DRAIN_TIMEOUT_S)
    bad = [reply.code for reply in answered.values() if reply.outcome != ReplyOutcome.OK]
    assert not bad, f"{len(bad)} honest requests were not answered with ok: {Counter(bad)}"
    request = pipeline.request(prompt="an honest one")
    pipeline.publish(HOSTILE, request)
    topic = requests_topic(pipeline.tenant(HOSTILE))
    with _group_reader(served) as reader:
        partition = TopicPartition(topic, 0)
        (_, end) = reader.get_watermark_offsets(partition, timeout=10)
        eventually(lambda: _committed(reader, partition) >= end, _DRAIN_TIMEOUT_S, f"the end of {topic} at {end}")
    pipeline.replies(HOSTILE).wait([request.request_id], _DRAIN_TIMEOUT_S)
    assert _ok(served, HOSTILE), "a call of the hostile tenant was not answered with 200"
    _check_alive(served, pids)


def _check_alive(served: Served, pids: Mapping[str, int]) -> None:
    for name, process in served.pipeline.processes.items():
        assert process.alive, f"{name} ended with {process.exit_status}"
        assert process.pid == pids[name], f"{name} is another process"


def _broken(look: Callable[[], None]) -> str | None:
    try:
        look()
    except AssertionError as error:
        return str(error)
    return None


@contextmanager
def _group_reader(served: Served) -> Iterator[Consumer]:
    pipeline = served.pipeline
    reader = Consumer(
        {**connection(pipeline.settings), "group.id": pipeline.dispatcher_group, "isolation.level": "read_committed"}
    )
    try:
        yield reader
    finally:
        reader.close()


def _committed(reader: Consumer, partition: TopicPartition) -> int:
    try:
        return int(reader.committed([partition], timeout=5)[0].offset)
    except KafkaException:
        # A transaction that settles it just now: ask again.
        return -1


def _ok(served: Served, tenant: str) -> bool:
    with served.client(tenant) as client:
        return client.post("/v1/chat/completions", json=served.chat()).status_code == 200


def _memory_mib(pids: Mapping[str, int]) -> dict[str, float]:
    """The most that each process ever had; of one that is gone, nothing."""
    found = {}
    for name, pid in pids.items():
        with suppress(OSError):
            found[f"{name} MiB"] = float(peak_bytes(pid) // 2**20)
    return found


class _Attacker:
    """Does what an action says; counts what came of it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.done = 0
        self.last: deque[Action] = deque(maxlen=_KEPT_ACTIONS)
        self.statuses: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.written = 0
        self._producers: dict[str, Producer] = {}
        self._topic = requests_topic(served.pipeline.tenant(HOSTILE))
        self._address = ("127.0.0.1", served.ports["gateway-1"])
        self._key = served.keys[HOSTILE]

    def do(self, action: Action) -> None:
        """Raises AssertionError for an answer that may not be."""
        self.last.append(action)
        self.done += 1
        match action["door"]:
            case "kafka" if "batch" in action:
                self._write_batch(base64.b64decode(action["batch"]))
            case "kafka":
                self._write(action)
            case "http":
                self._call(action)
            case _:
                data = base64.b64decode(action["data"]).replace(b"KEY", self._key.encode())
                answer = self._exchange(data, _SOCKET_TIMEOUT_S)
                assert b"HTTP/1.1 500" not in answer, "a bare connection was answered with 500"

    def figures(self) -> dict[str, float]:
        """What was done."""
        statuses = {f"answers with {status}": float(count) for status, count in sorted(self.statuses.items())}
        return {"records written": float(self.written), **statuses}

    def close(self) -> None:
        """After the last action."""
        self._producers.clear()

    def _write_batch(self, batch: bytes) -> None:
        servers = self.served.pipeline.settings.kafka_bootstrap_servers
        try:
            produce_batch(servers, self._topic, batch)
        except ProduceRefusedError as error:
            self.refused[error.name] += 1
        except OSError:
            self.refused["the broker closed the connection"] += 1
        else:
            self.written += 1

    def _write(self, action: Action) -> None:
        producer = self._producer(action["codec"])
        for part in action["records"]:
            key, value = hostile_records.bytes_of(part, "key"), hostile_records.bytes_of(part, "value")
            headers: list[tuple[str, str | bytes | None]] = [*hostile_records.headers_of(part)]
            try:
                producer.produce(self._topic, value, key, headers=headers, on_delivery=self._delivered)
            except (KafkaException, BufferError):
                self.refused["by the client"] += 1
        assert producer.flush(_FLUSH_TIMEOUT_S) == 0, "Kafka takes nothing any more"

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is None:
            self.written += 1
        else:
            self.refused[str(error.name())] += 1

    def _producer(self, codec: str) -> Producer:
        if codec not in self._producers:
            config: dict[str, Any] = {
                **connection(self.served.pipeline.settings),
                "compression.type": codec,
                "message.max.bytes": 104_857_600,
                "queue.buffering.max.kbytes": 524_288,
                "message.timeout.ms": 20_000,
                "linger.ms": 5,
            }
            self._producers[codec] = Producer(config)
        return self._producers[codec]

    def _call(self, action: Action) -> None:
        body = base64.b64decode(action["body"])
        path = action["path"].encode("utf-8").replace(b" ", b"%20")
        headers = {"host": "fuzz", "authorization": f"Bearer {self._key}", **action["headers"], "connection": "close"}
        lines = [f"{name}: {value}".encode() for name, value in headers.items()]
        head = b"\r\n".join((action["method"].encode() + b" " + path + b" HTTP/1.1", *lines))
        answer = self._exchange(head + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n\r\n" + body)
        assert answer, f"{action['method']} {action['path'][:100]}: no answer within {_ANSWER_TIMEOUT_S:g} s"
        status = _status(answer)
        self.statuses[status] += 1
        assert status != 500, f"{action['method']} {action['path'][:100]}: status 500"

    def _exchange(self, data: bytes, timeout_s: float = _ANSWER_TIMEOUT_S) -> bytes:
        found = b""
        try:
            with socket.create_connection(self._address, timeout=timeout_s) as connected:
                connected.sendall(data)
                while len(found) < _MOST_ANSWER_BYTES and (part := connected.recv(65_536)):
                    found += part
        except OSError:
            # Cut or slow: what came of it counts.
            pass
        return found


class _Honest:
    """The other tenant's requests, over Kafka and over HTTP, from a thread of its own until the end."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.published: list[str] = []
        self._latencies_s: list[float] = []
        self._failed: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest")

    def __enter__(self) -> "_Honest":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raises AssertionError for a call that was not answered as it must be."""
        assert self._failed is None, f"an honest call: {self._failed}"

    def figures(self) -> dict[str, float]:
        ordered = sorted(self._latencies_s) or [0.0]
        return {
            "honest records": float(len(self.published)),
            "honest calls": float(len(self._latencies_s)),
            "honest calls p50 ms": 1_000 * ordered[len(ordered) // 2],
            "honest calls p99 ms": 1_000 * ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        }

    def _run(self) -> None:
        try:
            with self._served.client(HONEST) as client:
                while not self._stop.wait(0.05):
                    self._one(client)
        except Exception as error:  # noqa: BLE001 - told by `check`
            self._failed = repr(error)

    def _one(self, client: httpx.Client) -> None:
        request = self._served.pipeline.request(prompt="an honest one")
        self._served.pipeline.publish(HONEST, request)
        self.published.append(request.request_id)
        began = time.monotonic()
        answer = client.post("/v1/chat/completions", json=self._served.chat())
        self._latencies_s.append(time.monotonic() - began)
        if answer.status_code != 200:
            self._failed = f"status {answer.status_code}"


def _status(answer: bytes) -> int:
    line = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n")[0].split(b" ")
    return int(line[1]) if len(line) > 1 and line[1].isdigit() else 0
