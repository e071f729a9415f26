"""An inference consumer and damaged batches of work: what stands around them is answered, and commits go on."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

from fairlane import headers, names
from fairlane.outcomes import Outcome
from fairlane.records import WorkItem
from fairlane.skipping_consumer import BAD_HEADERS
from tests.kit.broker_log import PartitionLog
from tests.kit.damage import DAMAGES, Damage, KeyAndValue, write_batch
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, header, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import PATIENCE_S, eventually
from tests.kit.work_items import work_item

pytestmark = [pytest.mark.full, pytest.mark.broker]

PER_BATCH = 3


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Nothing but topics: work is written as a dispatcher would."""
    with Pipeline(broker, tmp_path_factory.mktemp("hostile"), unique_name()) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


@pytest.fixture(scope="module")
def letters(pipeline: Pipeline) -> LogReader:
    return pipeline.reader(names.DEAD_LETTER_WORK, from_beginning=False)


@pytest.fixture(scope="module")
def consumer(pipeline: Pipeline) -> ServiceProcess:
    return pipeline.consumer(1).wait_ready()


def encoded(pipeline: Pipeline, items: Sequence[WorkItem]) -> list[KeyAndValue]:
    return [(item.request.request_id.encode(), pipeline.codec.encode(item)) for item in items]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_work_around_a_damaged_batch_is_answered(
    pipeline: Pipeline,
    replies: Replies,
    letters: LogReader,
    consumer: ServiceProcess,
    broker_log_dir: Path,
    broker: str,
    damage: Damage,
) -> None:
    batches = [[work_item(pipeline) for _ in range(PER_BATCH)] for _ in range(3)]
    topic = names.priority_topic(batches[0][0].pool, batches[0][0].priority_class)
    assert consumer.stop() == 0
    starts = [write_batch(broker, topic, encoded(pipeline, items)) for items in batches]
    log = PartitionLog.of(broker_log_dir, topic)
    damage.apply(log, log.at(starts[1]), encoded(pipeline, batches[1]))
    letters.records.clear()

    consumer.start().wait_ready()
    expected = [item.request.request_id for item in (*batches[0], *batches[1][damage.survivors], *batches[2])]
    assert {reply.outcome for reply in replies.wait(expected).values()} == {Outcome.OK}
    replies.read_to_end()
    replies.exactly_once(expected)
    lost = {item.request.request_id for item in batches[1]} - set(expected)
    assert not lost & replies.by_id.keys()
    eventually(lambda: committed(pipeline, topic) >= starts[2] + PER_BATCH, what="the commit behind it")

    problem = damage.problem or BAD_HEADERS
    counted = consumer.metric("fairlane_unreadable_records_total", reader="consumer", problem=problem)
    assert counted == (PER_BATCH if damage.problem or "header" in damage.name else 0)
    if damage.problem is None:
        letters.read_to_end()
        assert pipeline.dead_letters(letters) == []
        return
    letters.wait(lambda: pipeline.dead_letters(letters), what="the dead letter")
    letters.read_to_end()
    (letter,) = pipeline.dead_letters(letters)
    assert letter.value() == b""
    assert header(letter, headers.DLT_ORIGINAL_TOPIC) == topic
    assert int(header(letter, headers.DLT_ORIGINAL_OFFSET)) == starts[1]
    why = header(letter, headers.DLT_EXCEPTION_MESSAGE)
    assert f"offsets {starts[1]} to {starts[1] + PER_BATCH - 1} cannot be read" in why
    assert damage.problem in why

    assert consumer.stop() == 0
    consumer.start().wait_ready()
    after = [work_item(pipeline)]
    write_batch(broker, topic, encoded(pipeline, after))
    replies.wait([after[0].request.request_id])
    letters.read_to_end()
    assert len(pipeline.dead_letters(letters)) == 1, "kept once, whoever comes next"


def committed(pipeline: Pipeline, topic: str) -> int:
    """Where the pool's group goes on."""
    asked = pipeline.admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(pipeline.pool_group(), [TopicPartition(topic, 0)])]
    )
    (found,) = next(iter(asked.values())).result(PATIENCE_S).topic_partitions
    return int(found.offset)
