"""Replays that are interrupted, refused or run twice at once: no letter is sent twice, and none is marked in vain."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from fairlane import names
from fairlane.clock import now_ms
from fairlane.kafka_config import transactional_producer
from fairlane.records import SourceCoordinate
from fairlane_server.dead_letters.bulk import DeadLetters
from fairlane_server.dead_letters.letters import Letter, ReplayMark, mark_headers
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import Replay, Replayer, make_replay, mark_record
from fairlane_server.kafka.cluster_admin import ClusterError
from tests.kit.dead_letters_bench import DeadLettersBench, dead_letters

pytestmark = [pytest.mark.full, pytest.mark.broker]

WORK = DeadLetters.WORK
NEW_ID = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
def bench(
    broker: str, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[DeadLettersBench]:
    with dead_letters(broker, unique, tmp_path, monkeypatch, capsys) as bench:
        yield bench


@pytest.fixture
def log(bench: DeadLettersBench) -> Iterator[DeadLetterReader]:
    with DeadLetterReader(bench.pipeline.settings, bench.pipeline.codec) as log:
        yield log


def replayer(bench: DeadLettersBench) -> Replayer:
    made = Replayer(bench.pipeline.settings, bench.pipeline.codec, "dlq:test", now_ms)
    made.fence([bench.pipeline.tenant("a")])
    return made


def replay_of(log: DeadLetterReader, place: SourceCoordinate) -> Replay:
    letter = log.find(place)
    assert letter is not None
    return make_replay(letter, NEW_ID)


def test_ctrl_c_ends_after_a_letter_and_the_same_command_goes_on(
    bench: DeadLettersBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [bench.pipeline.request() for _ in range(3)]
    for request in requests:
        bench.bury(request)
    send, sent = Replayer.send, 0

    def interrupted(replayer: Replayer, replay: Replay) -> SourceCoordinate:
        nonlocal sent
        sent += 1
        if sent == 2:
            signal.raise_signal(signal.SIGINT)
        return send(replayer, replay)

    monkeypatch.setattr(Replayer, "send", interrupted)
    code, text, _ = bench.run("replay", "--topic", "work", "--rate", "1000")
    assert code == 1
    assert "stopped: 2 replayed, 1 left\n" in text
    assert bench.run("replay", "--topic", "work")[1].endswith(
        "1 replayed, 2 replayed before (--again sends them once more)\n"
    )
    reader = bench.pipeline.reader(names.requests_topic(bench.pipeline.tenant("a")))
    reader.read_to_end()
    assert len(reader.records) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_latest_replay_stops_those_before_it(bench: DeadLettersBench, log: DeadLetterReader) -> None:
    first, second = (bench.bury(bench.pipeline.request()) for _ in range(2))
    older = replayer(bench)
    older.send(replay_of(log, first))
    newer = replayer(bench)
    with pytest.raises(ClusterError, match="another replay was started"):
        older.send(replay_of(log, second))
    newer.send(replay_of(log, second))
    older.close()
    newer.close()
    assert [len(one["replayed_as"]) for one in bench.json("list")["letters"]] == [1, 1]


def test_a_replay_that_was_killed_has_not_happened(bench: DeadLettersBench, log: DeadLetterReader) -> None:
    place = bench.bury(bench.pipeline.request())
    killed = Producer(
        transactional_producer(bench.pipeline.settings, names.dead_letter_replay_id(bench.pipeline.tenant("a")), 10_000)
        | {"log_level": 0}
    )
    killed.init_transactions(10)
    killed.begin_transaction()
    mark = mark_record(replay_of(log, place))
    killed.produce(mark.topic, mark.value, mark.key, headers=list(mark.headers), partition=0)
    killed.flush(10)
    *_, last = bench.lines("replay", "--topic", "work")
    assert last["summary"]["replayed"] == 1
    assert len(bench.json("list")["letters"][0]["replayed_as"]) == 1


@pytest.fixture
def open_letter(bench: DeadLettersBench, unique: str) -> Iterator[Callable[[], Callable[[], None]]]:
    """Writes a letter in a transaction that stays open, and gives what aborts it."""
    consumer = Producer(transactional_producer(bench.pipeline.settings, unique, 20_000))
    consumer.init_transactions(10)

    def write() -> Callable[[], None]:
        consumer.begin_transaction()
        consumer.produce(bench.topics[WORK], b"a letter that is not written in the end", partition=0)
        consumer.flush(10)
        return partial(consumer.abort_transaction, 10)

    yield write
    consumer.close()


def test_an_open_transaction_is_waited_for(
    bench: DeadLettersBench, log: DeadLetterReader, open_letter: Callable[[], Callable[[], None]]
) -> None:
    place = bench.bury(bench.pipeline.request())
    abort = open_letter()
    bench.pipeline.write(place.topic, [(None, b"")], mark_headers(place, NEW_ID))
    (short,) = log.stretches([place.topic])
    assert [offset for offset, _ in log.read(short)] == [0], "what is committed behind it is hidden"
    (whole,) = log.stretches([place.topic], whole=True)
    found = log.read(whole)
    assert isinstance(next(found)[1], Letter)
    abort()
    assert [entry for _, entry in found] == [ReplayMark(place, NEW_ID)]
    abort = open_letter()
    (whole,) = log.stretches([place.topic], whole=True)
    found = log.read(whole)
    assert isinstance(next(found)[1], Letter)
    abort()
    assert len(list(found)) == 1, "and no record stands at the end"


def test_a_mark_behind_an_open_transaction_counts(
    bench: DeadLettersBench, open_letter: Callable[[], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bench.bury(bench.pipeline.request())
    abort = open_letter()
    bench.pipeline.write(place.topic, [(None, b"")], mark_headers(place, NEW_ID))
    stretches = DeadLetterReader.stretches

    def aborted_then(log: DeadLetterReader, topics: list[str], **options: Any) -> list[PartitionRange]:
        found = stretches(log, topics, **options)
        if options.get("whole"):
            abort()
        return found

    monkeypatch.setattr(DeadLetterReader, "stretches", aborted_then)
    *_, last = bench.lines("replay", "--topic", "work")
    assert (last["summary"]["replayed"], last["summary"]["replayed_before"]) == (0, 1)


def test_a_request_that_its_topic_refuses_leaves_no_mark(bench: DeadLettersBench) -> None:
    bench.bury(bench.pipeline.request(prompt="x" * 3_000))
    small = bench.pipeline.request()
    bench.bury(small)
    topic = names.requests_topic(bench.pipeline.tenant("a"))

    def limit(operation: AlterConfigOpType) -> None:
        entry = ConfigEntry("max.message.bytes", "2000", incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        bench.pipeline.admin.incremental_alter_configs([resource])[resource].result(10)

    limit(AlterConfigOpType.SET)
    code, text, complaint = bench.run("replay", "--all")
    assert code == 1
    assert "1 replayed, 1 failed\n" in text, complaint
    assert "work-0@0: failed: Broker: Message size too large" in complaint
    assert [len(one["replayed_as"]) for one in bench.json("list")["letters"]] == [0, 1]
    limit(AlterConfigOpType.DELETE)
    code, text, _ = bench.run("replay", "--all")
    assert code == 0
    assert "1 replayed, 1 replayed before" in text
