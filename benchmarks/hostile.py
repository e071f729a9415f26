"""hostile: latency of an honest tenant beside hostile records of another, and the dispatcher's peak memory.

The honest tenant sends 50 small requests a second. For every kind of attack, seconds of calm and of paced attack take
turns, so that a change of the machine's load affects both; the figure is the p99 beside the attack divided by that of
the calm. The broker and the sender share the machine, so the attack is also sent, in turn, to a topic that no
dispatcher reads: the second figure is divided by the p99 beside that.
"""

from collections.abc import Iterator
from itertools import repeat
from statistics import median
from time import monotonic, sleep

from benchmarks.cluster import cluster, create_topics
from benchmarks.load import Neighbour, make_request
from benchmarks.processes import peak_bytes, reset_peak
from benchmarks.record_batches import Written, batch, gzip_of_zeros, produce_batch
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from benchmarks.simulated_pool import INSTANT_SERVICES
from fairlane.codec import Codec
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
_MIB = 1024 * 1024


def attacks(codec: Codec) -> dict[str, tuple[float, Iterator[bytes]]]:
    """Batches per second and the batches to send, by kind of attack."""

    def honest() -> Iterator[bytes]:
        while True:
            requests = [make_request(input=RequestInput(prompt="hello " * 100)) for _ in range(20)]
            yield batch(map(codec.encode, requests), codec=3)

    invalid = codec.encode(make_request(timeout_ms=0))
    million = codec.encode(make_request(input=RequestInput(messages=(Message("", ""),) * 1_000_000)))
    bomb, dense = (batch([b""], codec=1, compressed=gzip_of_zeros(size)) for size in (300 * _MIB, 15 * _MIB))
    many_headers = batch([Written(invalid, None, [(b"", None)] * 500_000)])
    no_text = batch([Written(invalid, None, [(b"\xff\xfe", b"x")])] * 100)
    return {
        "20 honest requests in a batch of lz4, 1/s": (1, honest()),
        "header names that are no text, 1,000/s": (10, repeat(no_text)),
        "records with 500,000 headers, 2/s": (2, repeat(many_headers)),
        "requests with 1,000,000 messages, 2/s": (2, repeat(batch([million]))),
        "gzip bombs of 300 MB, 1 in 5 s": (0.2, repeat(bomb)),
        "gzip batches of 15 MB, 2/s": (2, repeat(dense)),
        "empty records, 20,000/s": (10, repeat(batch([b""] * 2_000, codec=4))),
        "bytes that are no record, 2,000/s": (50, repeat(batch([b"\0no record"] * 40))),
        "requests that are refused, 2,000/s": (50, repeat(batch([invalid] * 40))),
    }


def run(rounds: int = ROUNDS, seconds: float = SECONDS, only: str = "") -> Result:
    """Every kind of attack in turn, on one stack; ``only`` those whose name contains this."""
    codec = default_codec()
    runs: dict[str, dict[str, float]] = {}
    with cluster(INSTANT_SERVICES, tenants=(_HONEST, _HOSTILE)) as servers:
        pid = servers.stack.supervisor.process("dispatcher-1").pid or 0
        create_topics(servers.settings, (_UNREAD_TOPIC,))
        neighbour = Neighbour(servers.settings, codec, _HONEST, make_request, _PER_S)
        with neighbour.sending():
            sleep(_WARM_UP_S)
            for name, (per_s, batches) in attacks(codec).items():
                if only in name:
                    runs[name] = _measured(servers.settings, neighbour, pid, per_s, batches, rounds, seconds)
        if servers.stack.supervisor.process("dispatcher-1").pid != pid:
            raise RuntimeError("the dispatcher ended")
    ratios = {name: run["attack_p99_ms"] / run["calm_p99_ms"] for name, run in runs.items()}
    unread = {name: run["attack_p99_ms"] / run["unread_p99_ms"] for name, run in runs.items()}
    figures = [
        Figure(f"p99 beside {name}, over p99 {without}", found[name], "ratio")
        for name in runs
        for without, found in (("without", ratios), ("beside the same on a topic that nobody reads", unread))
    ]
    peak_mib = max(run["peak_mib"] for run in runs.values())
    return Result(
        NAME,
        (
            Figure(
                "the worst p99 beside an attack, over p99 without", max(ratios.values()), "ratio", "at most", AIM_RATIO
            ),
            Figure(
                "the worst p99 beside an attack, over p99 beside the same on a topic that nobody reads",
                max(unread.values()),
                "ratio",
            ),
            Figure("the dispatcher's memory at its peak", peak_mib, "MiB", "at most", AIM_MIB),
            Figure("p99 without an attack, median", median(run["calm_p99_ms"] for run in runs.values()), "ms"),
            *figures,
        ),
        tuple(runs.values()),
    )


def _measured(
    settings: KafkaSettings,
    neighbour: Neighbour,
    pid: int,
    per_s: float,
    batches: Iterator[bytes],
    rounds: int,
    seconds: float,
) -> dict[str, float]:
    topics = {"calm": "", "unread": _UNREAD_TOPIC, "attack": requests_topic(_HOSTILE)}
    latencies_s: dict[str, list[float]] = {name: [] for name in topics}
    reset_peak(pid)
    for _ in range(rounds):
        for name, topic in topics.items():
            since, started, sent = neighbour.mark(), monotonic(), 0
            while (passed := monotonic() - started) < seconds:
                if topic and passed * per_s >= sent:
                    produce_batch(settings.kafka_bootstrap_servers, topic, next(batches))
                    sent += 1
                else:
                    due = sent / per_s if topic else seconds
                    sleep(max(0.0, min(due, seconds) - passed))
            latencies_s[name] += neighbour.latencies_s(since)
            if topic:
                # What the attack left behind belongs to no measurement.
                sleep(_SETTLE_S)
    return {
        **{f"{name}_p50_ms": 1_000 * percentile(found, 0.5) for name, found in latencies_s.items()},
        **{f"{name}_p99_ms": 1_000 * percentile(found, 0.99) for name, found in latencies_s.items()},
        "attack_max_ms": 1_000 * max(latencies_s["attack"]),
        "requests": float(len(latencies_s["attack"])),
        "peak_mib": peak_bytes(pid) / _MIB,
    }
