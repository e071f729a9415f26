"""Whatever bytes a tenant gets into its topic: its dispatcher lives, within a bound of memory, and everybody else's
requests are answered. One pipeline on the real broker, and honest traffic of a second tenant beside every case."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pytest
from confluent_kafka import Producer

from benchmarks.load import Neighbour
from benchmarks.processes import peak_bytes, reset_peak
from benchmarks.record_batches import (
    CODECS,
    Written,
    batch,
    deflated,
    gzip_of_zeros,
    produce_batch,
    record_bytes,
    varint,
)
from benchmarks.service_curve import percentile
from fairlane import headers, names
from fairlane.clock import now_ms
from fairlane.codec import DecodeProblem
from fairlane.kafka_config import connection
from fairlane.outcomes import Outcome
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.reading.bounded_fetcher import IDLE_WAIT_MS
from tests.kit.broker_log import GZIP, Batch, PartitionLog, noise
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import Pipeline, header, unique_name
from tests.kit.waiting import until_ms

pytestmark = [pytest.mark.full, pytest.mark.broker]

MIB = 1024 * 1024
MEMORY_BOUND_BYTES = 600 * MIB
"""What docs/architecture.md says of a dispatcher whose queues are empty."""

MOST_TIMES_SLOWER = 4.0
MORE_S = 1.0
"""Bounds of a stall, on a machine that does other work besides; `python -m benchmarks hostile` has the figures."""


class Stand:
    """A pipeline with a hostile tenant, and what tells how it fares."""

    def __init__(self, broker: str, pipeline: Pipeline) -> None:
        self.broker, self.pipeline = broker, pipeline
        self.topic = names.requests_topic(pipeline.tenant("hostile"))
        self.letters: LogReader = pipeline.reader(names.DEAD_LETTER_REQUESTS, from_beginning=False)
        self.replies = pipeline.replies("hostile")
        self.neighbour = Neighbour(pipeline.settings, pipeline.codec, pipeline.tenant("neighbour"), pipeline.request)
        self.pids = {name: process.pid for name, process in pipeline.processes.items()}
        self.calm_p99_s = 0.0
        self.paused_s = 0.0
        """How long a case has paused the dispatcher itself: its neighbour waited for that."""

    @contextmanager
    def dispatcher_paused(self) -> Iterator[None]:
        dispatcher, began_s = self.pipeline.processes["dispatcher-1"], monotonic()
        dispatcher.pause()
        try:
            yield
        finally:
            dispatcher.resume()
            self.paused_s += monotonic() - began_s

    def measure_calm(self) -> None:
        since = self.neighbour.mark()
        self.neighbour.wait_replies(150)
        self.calm_p99_s = percentile(self.neighbour.latencies_s(since), 0.99)

    def letter(self, problem: DecodeProblem, offset: int) -> dict[str, str]:
        """Wait for the dead letter of this offset of the hostile tenant's topic. Returns its headers."""
        found: dict[str, str] = {}

        def came() -> bool:
            for record in self.pipeline.dead_letters(self.letters):
                if header(record, headers.DLT_ORIGINAL_OFFSET) == str(offset):
                    found.update({name: header(record, name) for name in dict(record.headers() or ())})
            return bool(found)

        self.letters.wait(came, what=f"the dead letter of offset {offset}")
        assert found[headers.DLT_EXCEPTION_MESSAGE].startswith(problem), found
        assert found[headers.DLT_ORIGINAL_TOPIC] == self.topic
        return found

    def goes_on(self) -> None:
        """An honest request behind whatever was written is answered."""
        request = self.pipeline.request()
        self.pipeline.publish("hostile", request)
        assert self.replies.wait([request.request_id])[request.request_id].outcome == Outcome.OK

    @property
    def dispatcher_pid(self) -> int:
        return self.pids["dispatcher-1"]


@pytest.fixture(scope="module")
def running(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    folder = tmp_path_factory.mktemp("hostile")
    with Pipeline(broker, folder, unique_name(), tenants=("hostile", "neighbour")) as pipeline:
        pipeline.start()
        stand = Stand(broker, pipeline)
        with stand.neighbour.sending():
            stand.neighbour.wait_replies(50)
            stand.measure_calm()
            yield stand


@pytest.fixture
def stand(running: Stand) -> Iterator[Stand]:
    """Around every case: honest traffic, the same processes, bounded memory, an answer behind what was written."""
    reset_peak(running.dispatcher_pid)
    since, running.paused_s = running.neighbour.mark(), 0.0
    yield running
    running.goes_on()
    if (more := 100 - (running.neighbour.mark() - since)) > 0:
        running.neighbour.wait_replies(more)
    p99_s = percentile(running.neighbour.latencies_s(since), 0.99)
    assert p99_s <= MOST_TIMES_SLOWER * running.calm_p99_s + MORE_S + running.paused_s
    assert {name: process.pid for name, process in running.pipeline.processes.items() if process.alive} == running.pids
    assert peak_bytes(running.dispatcher_pid) <= MEMORY_BOUND_BYTES


@pytest.mark.parametrize("codec", CODECS)
def test_a_clients_compression_is_its_own_affair(stand: Stand, codec: str) -> None:
    """Twenty honest requests in one batch."""
    producer = Producer(connection(stand.pipeline.settings) | {"compression.type": codec, "linger.ms": 100})
    requests = [stand.pipeline.request(prompt="again and " * 50) for _ in range(20)]
    for request in requests:
        producer.produce(stand.topic, stand.pipeline.codec.encode(request), request.request_id)
    assert producer.flush(30) == 0
    found = stand.replies.wait([request.request_id for request in requests])
    assert {reply.outcome for reply in found.values()} == {Outcome.OK}


@pytest.mark.parametrize(
    "spoilt", [[(b"\xff\xfe", b"x")], [(b"h", b"")] * 2_000], ids=["a name that is no text", "2,000 headers"]
)
def test_headers_spoil_their_own_record_alone(stand: Stand, spoilt: list[tuple[bytes, bytes]]) -> None:
    good = [stand.pipeline.request() for _ in range(2)]
    first, last = (Written(stand.pipeline.codec.encode(one)) for one in good)
    bad = Written(first.value, b"\xff no text either", spoilt)
    offset = produce_batch(stand.broker, stand.topic, batch([first, bad, last]))
    stand.letter(DecodeProblem.BAD_HEADER, offset + 1)
    stand.replies.wait([one.request_id for one in good])


def test_a_key_that_is_no_text_changes_nothing(stand: Stand) -> None:
    request = stand.pipeline.request()
    value = stand.pipeline.codec.encode(request)
    produce_batch(stand.broker, stand.topic, batch([Written(value, b"\xff\xfe no text")]))
    assert stand.replies.wait([request.request_id])[request.request_id].outcome == Outcome.OK


def test_a_record_with_a_million_headers_is_a_dead_letter(stand: Stand) -> None:
    offset = produce_batch(stand.broker, stand.topic, batch([Written(b"x", None, [(b"", None)] * 1_000_000)]))
    stand.letter(DecodeProblem.BAD_HEADER, offset)


@pytest.mark.parametrize(
    ("codec", "compressed", "size"),
    [
        pytest.param(1, gzip_of_zeros, 300 * MIB, id="gzip"),
        pytest.param(2, lambda size: deflated(2, zeros(size)), 64 * MIB, id="snappy"),
        pytest.param(3, lambda size: deflated(3, zeros(size)), 128 * MIB, id="lz4"),
        pytest.param(4, lambda size: deflated(4, zeros(size)), 128 * MIB, id="zstd"),
    ],
)
def test_a_bomb_is_a_dead_letter(stand: Stand, codec: int, compressed: Callable[[int], bytes], size: int) -> None:
    bomb = batch([b""], codec=codec, compressed=compressed(size))
    assert len(bomb) < 4 * MIB
    offset = produce_batch(stand.broker, stand.topic, bomb)
    kept = stand.letter(DecodeProblem.INFLATES_TOO_FAR, offset)
    assert "16777216" in kept[headers.DLT_EXCEPTION_MESSAGE]


def zeros(size: int) -> bytes:
    """The body of a batch of one record, whose value has so many zeros."""
    return record_bytes(Written(bytes(size)), 0)


def test_a_record_above_its_topics_limit_once_inflated_is_a_dead_letter(stand: Stand) -> None:
    good = [stand.pipeline.request() for _ in range(2)]
    first, last = (Written(stand.pipeline.codec.encode(one)) for one in good)
    offset = produce_batch(stand.broker, stand.topic, batch([first, bytes(9 * MIB), last], codec=4))
    stand.letter(DecodeProblem.TOO_LARGE, offset + 1)
    stand.replies.wait([one.request_id for one in good])


def test_keys_of_sixteen_mebibytes_stop_no_reading(stand: Stand) -> None:
    """In one poll they would be more than may be handed to the event loop at once."""
    pipeline = stand.pipeline
    value = pipeline.codec.encode(pipeline.request())
    topics = (stand.topic, names.backfill_topic(pipeline.tenant("hostile")))
    with stand.dispatcher_paused():
        for _ in range(4):
            for topic in topics:
                produce_batch(stand.broker, topic, batch([Written(value, bytes(15 * MIB))], codec=1))
            last = produce_batch(stand.broker, stand.topic, batch([Written(value, bytes(7 * MIB))], codec=1))
    kept = stand.letter(DecodeProblem.TOO_LARGE, last - 1)
    assert "8388608" in kept[headers.DLT_EXCEPTION_MESSAGE]


def test_a_batch_of_empty_records_delays_nobody_else(stand: Stand) -> None:
    """Each is a dead letter of its own: they are read as fast as their tenant may be wrong."""
    producer_batch = batch([b""] * 400, codec=4)
    offset = produce_batch(stand.broker, stand.topic, producer_batch)
    stand.letter(DecodeProblem.EMPTY, offset + 399)


def test_garbage_compressed_well_is_bounded_in_memory(stand: Stand) -> None:
    """Batches of 16 KiB on the wire, each of which inflates to 15 MiB: a fetch holds sixty of them."""
    value = gzip_of_zeros(15 * MIB)
    last = [produce_batch(stand.broker, stand.topic, batch([b""], codec=1, compressed=value)) for _ in range(12)]
    stand.letter(DecodeProblem.TOO_LARGE, last[-1])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        pytest.param(lambda log, victim: log.flip(victim), DecodeProblem.BAD_CRC, id="bad-crc"),
        pytest.param(lambda log, victim: log.set_magic(victim, 3), DecodeProblem.UNKNOWN_MAGIC, id="unknown-magic"),
        pytest.param(lambda log, victim: log.set_magic(victim, 0), DecodeProblem.UNKNOWN_MAGIC, id="old-magic"),
        pytest.param(
            lambda log, victim: log.replace(victim, attributes=GZIP, body=noise(victim)),
            DecodeProblem.BAD_COMPRESSION,
            id="no-gzip",
        ),
        pytest.param(
            lambda log, victim: log.replace(victim, attributes=6), DecodeProblem.BAD_COMPRESSION, id="unknown-codec"
        ),
        pytest.param(
            lambda log, victim: log.replace(victim, record_count=2**31 - 1), DecodeProblem.BAD_BATCH, id="count"
        ),
        pytest.param(
            lambda log, victim: log.replace(victim, body=varint(-7) + noise(victim)[1:]),
            DecodeProblem.BAD_BATCH,
            id="no-records",
        ),
        pytest.param(lambda log, victim: log.make_empty(victim), None, id="compacted"),
        pytest.param(lambda log, victim: log.make_control(victim), None, id="control"),
    ],
)
def test_what_is_damaged_on_the_brokers_disk_is_passed(
    stand: Stand,
    broker_log_dir: Path,
    damage: Callable[[PartitionLog, Batch], None],
    problem: DecodeProblem | None,
) -> None:
    """A broker refuses these from a producer. What stands before and behind the damage is answered."""
    pipeline = stand.pipeline
    before, behind = pipeline.request(), pipeline.request()
    with stand.dispatcher_paused():
        pipeline.publish("hostile", before)
        # The fetch that was under way is answered with that: it waits for IDLE_WAIT_MS at most. The next one comes
        # after the pause and brings the rest, damaged.
        until_ms(now_ms() + 5 * IDLE_WAIT_MS)
        victim_at = produce_batch(stand.broker, stand.topic, batch([b"." * 200, b"," * 200]))
        pipeline.publish("hostile", behind)
        log = PartitionLog.of(broker_log_dir, stand.topic)
        damage(log, log.at(victim_at))
    stand.replies.wait([before.request_id, behind.request_id])
    if problem is not None:
        stand.letter(problem, victim_at + 1)
        assert letter_bytes(stand, SourceCoordinate(stand.topic, 0, victim_at + 1))


def letter_bytes(stand: Stand, source: SourceCoordinate) -> bytes:
    return next(
        record.value() or b""
        for record in stand.pipeline.dead_letters(stand.letters)
        if header(record, headers.DLT_ORIGINAL_OFFSET) == str(source.offset)
    )


@pytest.mark.parametrize("kind", ["garbage", "invalid"])
def test_a_flood_of_what_is_refused_delays_its_sender_alone(stand: Stand, kind: str) -> None:
    pipeline = stand.pipeline
    value = b"\0no record" if kind == "garbage" else pipeline.codec.encode(pipeline.request(timeout_ms=0))
    producer = Producer(connection(pipeline.settings) | {"linger.ms": 20})
    for _ in range(1_500):
        producer.produce(stand.topic, value)
    assert producer.flush(30) == 0
