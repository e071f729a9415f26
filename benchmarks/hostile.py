"""hostile: latency of an honest tenant beside hostile records of another, and the dispatcher's peak memory.

The honest tenant sends 50 small requests a second. For every kind of attack, seconds of calm and of paced attack take
turns, so that a change of the machine's load affects both; the figure is the p99 beside the attack divided by that of
the calm. The broker and the sender share the machine, so the attack is also sent, in turn, to a topic that no
dispatcher reads: the second figure is divided by the p99 beside that.
"""

from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic, sleep

from confluent_kafka import Producer

from benchmarks.cluster import BenchStack, cluster, create_topics
from benchmarks.load import Neighbour, make_request
from benchmarks.processes import peak_bytes, reset_peak
from benchmarks.record_batches import Written, batch, gzip_of_zeros, produce_batch
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from benchmarks.simulated_pool import INSTANT_SERVICES
from fairlane.codec import Codec
from fairlane.kafka_config import connection
from fairlane.names import requests_topic
from fairlane.records import Message, RequestInput
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

NAME = "hostile"
ROUNDS = 6
SECONDS = 5.0
HOW = (
    f"{ROUNDS} times {SECONDS:g} s of calm, of the attack on a topic that nobody reads, and of the attack itself, "
    "for each kind, in turns; the p99 of each"
)
AIM_RATIO = 1.2
AIM_MIB = 600
_HONEST, _HOSTILE = "honest", "hostile"
_UNREAD_TOPIC = "unread"
_PER_S = 50.0
_WARM_UP_S = 20.0
_SETTLE_S = 1.0
_ANSWER_TIMEOUT_S = 60.0
_MIB = 1024 * 1024
_FLOOD_PER_S = 2_000


class Sender:
    """Writes to one topic whatever it is given."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self.topic = topic
        self._servers = settings.kafka_bootstrap_servers
        self._producers: dict[str, Producer] = {}
        self._settings = settings

    def batch(self, data: bytes) -> None:
        produce_batch(self._servers, self.topic, data)

    def records(self, values: Sequence[bytes], compression: str = "none") -> None:
        producer = self._producers.get(compression)
        if producer is None:
            config = connection(self._settings) | {"compression.type": compression, "linger.ms": 10}
            producer = self._producers[compression] = Producer(config)
        for value in values:
            producer.produce(self.topic, value)
        producer.poll(0)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.flush(_ANSWER_TIMEOUT_S)


Attack = Callable[[Sender], None]


def attacks(codec: Codec) -> dict[str, tuple[float, Attack]]:
    """What is sent, and how often a second, by name."""
    invalid = codec.encode(make_request(timeout_ms=0))
    messages = tuple(Message("", "") for _ in range(1_000_000))
    million = batch([codec.encode(make_request(input=RequestInput(messages=messages)))])
    bomb, dense = (batch([b""], codec=1, compressed=gzip_of_zeros(size)) for size in (300 * _MIB, 15 * _MIB))
    empties = batch([b""] * 2_000, codec=4)
    many_headers = batch([Written(invalid, None, [(b"", None)] * 500_000)])
    no_text = batch([Written(invalid, None, [(b"\xff\xfe", b"x")])] * 100)
    return {
        "20 honest requests in a batch of lz4, 1/s": (1, lambda sender: _honest(sender, codec, "lz4")),
        "header names that are no text, 1,000/s": (10, lambda sender: sender.batch(no_text)),
        "records with 500,000 headers, 2/s": (2, lambda sender: sender.batch(many_headers)),
        "requests with 1,000,000 messages, 2/s": (2, lambda sender: sender.batch(million)),
        "gzip bombs of 300 MB, 1 in 5 s": (0.2, lambda sender: sender.batch(bomb)),
        "gzip batches of 15 MB, 2/s": (2, lambda sender: sender.batch(dense)),
        "empty records, 20,000/s": (10, lambda sender: sender.batch(empties)),
        f"bytes that are no record, {_FLOOD_PER_S:,}/s": (
            50,
            lambda sender: sender.records([b"\0no record"] * (_FLOOD_PER_S // 50)),
        ),
        f"requests that are refused, {_FLOOD_PER_S:,}/s": (
            50,
            lambda sender: sender.records([invalid] * (_FLOOD_PER_S // 50)),
        ),
    }


def _honest(sender: Sender, codec: Codec, compression: str) -> None:
    sender.records(
        [codec.encode(make_request(input=RequestInput(prompt="hello " * 100))) for _ in range(20)], compression
    )


def run(rounds: int = ROUNDS, seconds: float = SECONDS, only: str = "") -> Result:
    """Every kind of attack in turn, on one stack; ``only`` those whose name contains this."""
    codec = default_codec()
    runs: list[dict[str, float]] = []
    names: list[str] = []
    with cluster(INSTANT_SERVICES, tenants=(_HONEST, _HOSTILE)) as servers:
        pid = servers.stack.supervisor.process("dispatcher-1").pid or 0
        create_topics(servers.settings, (_UNREAD_TOPIC,))
        neighbour = Neighbour(servers.settings, codec, _HONEST, make_request, _PER_S)
        with neighbour.sending():
            _spend(_WARM_UP_S)
            for name, (per_s, attack) in attacks(codec).items():
                if only in name:
                    names.append(name)
                    runs.append(_measured(servers, neighbour, pid, per_s, attack, rounds, seconds))
        if servers.stack.supervisor.process("dispatcher-1").pid != pid:
            raise RuntimeError("the dispatcher ended")
    ratios = [one["attack_p99_ms"] / one["calm_p99_ms"] for one in runs]
    unread_ratios = [one["attack_p99_ms"] / one["unread_p99_ms"] for one in runs]
    figures = [
        Figure(f"p99 beside {name}, over p99 {without}", ratio, "ratio")
        for name, *both in zip(names, ratios, unread_ratios, strict=True)
        for without, ratio in zip(("without", "beside the same on a topic that nobody reads"), both, strict=True)
    ]
    return Result(
        NAME,
        (
            Figure("the worst p99 beside an attack, over p99 without", max(ratios), "ratio", "at most", AIM_RATIO),
            Figure(
                "the worst p99 beside an attack, over p99 beside the same on a topic that nobody reads",
                max(unread_ratios),
                "ratio",
            ),
            Figure(
                "the dispatcher's memory at its peak", max(one["peak_mib"] for one in runs), "MiB", "at most", AIM_MIB
            ),
            Figure("p99 without an attack, median", median(one["calm_p99_ms"] for one in runs), "ms"),
            *figures,
        ),
        tuple(runs),
    )


def _measured(
    servers: BenchStack, neighbour: Neighbour, pid: int, per_s: float, attack: Attack, rounds: int, seconds: float
) -> dict[str, float]:
    unread, hostile = (Sender(servers.settings, topic) for topic in (_UNREAD_TOPIC, requests_topic(_HOSTILE)))
    calm: list[float] = []
    beside_unread: list[float] = []
    beside: list[float] = []
    reset_peak(pid)
    for _ in range(rounds):
        since = neighbour.mark()
        _spend(seconds)
        calm += neighbour.latencies_s(since)
        for sender, found_s in ((unread, beside_unread), (hostile, beside)):
            since = neighbour.mark()
            _attack(sender, per_s, attack, seconds)
            found_s.extend(neighbour.latencies_s(since))
            # What the attack left behind belongs to no measurement.
            _spend(_SETTLE_S)
    unread.close()
    hostile.close()
    return {
        "calm_p50_ms": 1_000 * percentile(calm, 0.5),
        "calm_p99_ms": 1_000 * percentile(calm, 0.99),
        "unread_p50_ms": 1_000 * percentile(beside_unread, 0.5),
        "unread_p99_ms": 1_000 * percentile(beside_unread, 0.99),
        "attack_p50_ms": 1_000 * percentile(beside, 0.5),
        "attack_p99_ms": 1_000 * percentile(beside, 0.99),
        "attack_max_ms": 1_000 * max(beside),
        "requests": float(len(beside)),
        "peak_mib": peak_bytes(pid) / _MIB,
    }


def _attack(sender: Sender, per_s: float, attack: Attack, seconds: float) -> None:
    started = monotonic()
    sent = 0
    while (passed := monotonic() - started) < seconds:
        if passed * per_s >= sent:
            attack(sender)
            sent += 1
        else:
            _spend(min(sent / per_s - passed, seconds - passed))


def _spend(seconds: float) -> None:
    sleep(max(0.0, seconds))
