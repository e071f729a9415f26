"""The reply topic of jobs as its reader sees it: what is behind the last reply is no reason to wait for ever."""

from collections.abc import Iterator

import pytest

from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from producers.backfill.job import Fingerprint, Job, JobSpec, RowIds
from producers.backfill.job_store import new_job_id
from producers.backfill.kafka import KafkaReplies, reply_partitions
from tests.kit.recorder_kit import LogWriter, make_topics
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

TENANT = "acme"
REPLIES = "jobs.replies"


@pytest.fixture(scope="module")
def settings(broker: str) -> Settings:
    make_topics(broker)
    return Settings(kafka_bootstrap_servers=broker)


@pytest.fixture
def job(settings: Settings) -> Job:
    return Job(new_job_id(), TENANT, JobSpec("in", "out"), Fingerprint(1, "1"), 10, reply_partitions(settings))


@pytest.fixture
def replies(settings: Settings, job: Job) -> Iterator[KafkaReplies]:
    made = KafkaReplies(settings, default_codec(), job)
    yield made
    made.close()


def test_the_end_is_reached_behind_markers_and_what_was_aborted(
    broker: str, unique: str, job: Job, replies: KafkaReplies
) -> None:
    ids = RowIds(job.job_id, job.partitions)
    writer = LogWriter(broker, unique)
    replies.start(None)
    begin = replies.position
    for row, commit in enumerate((True, True, False)):
        request_id = ids.id_of(row)
        writer.write(REPLIES, [InferenceReply(request_id, TENANT, "ok")], commit=commit, key=request_id)
    writer.close()
    end = replies.end()
    found: list[str] = []

    def read() -> bool:
        found.extend(reply.request_id for reply in replies.read(0.2))
        return replies.position >= end

    eventually(read, what="the end of the partition")

    # Two replies and one that counts for nothing, and behind each the marker of its transaction.
    assert end >= begin + 6
    assert found == [ids.id_of(0), ids.id_of(1)]
