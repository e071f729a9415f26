"""A pipeline whose every answer is counted: what a bad record may do to the good ones around it."""

from dataclasses import dataclass, field

from confluent_kafka import Message

from deploy.local.stack import LocalStack
from fairlane import headers
from fairlane.outcomes import Outcome
from fairlane.records import AuditEvent, InferenceReply, SourceCoordinate
from tests.kit.bad_requests import SECRET
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, header


@dataclass
class Bench:
    """The pipeline, and everything it answered since it began."""

    pipeline: Pipeline
    redis: LocalStack
    replies: Replies
    audit: LogReader
    letters: LogReader
    expected: dict[str, int] = field(default_factory=dict)
    """How many replies each request must have in the end."""
    good: set[str] = field(default_factory=set)

    def publish_good(self) -> None:
        """One good request each of two tenants."""
        for tenant in ("a", "b"):
            request = self.pipeline.request(prompt=SECRET)
            self.expected[request.request_id] = 1
            self.good.add(request.request_id)
            self.pipeline.publish(tenant, request)

    def check_answers(self, timeout_s: float = 60.0) -> None:
        """Every request gets as many replies as it should, and not one more; the good ones are ``ok``."""
        self.replies.reader.wait(lambda: not self._missing(), timeout_s, "the replies")
        for request_id in self.good:
            assert self.replies.by_id[request_id][0].outcome == Outcome.OK
        counts = self.replies.counts
        assert {request_id: counts.get(request_id, 0) for request_id in self.expected} == self.expected

    def _missing(self) -> bool:
        self.replies.read_to_end()
        return any(self.replies.counts.get(request_id, 0) < count for request_id, count in self.expected.items())

    def audit_of(self, source: SourceCoordinate) -> AuditEvent:
        """The one audit event of this record."""

        def found() -> list[AuditEvent]:
            return [event for event in self.pipeline.decoded(self.audit, AuditEvent) if event.source == source]

        self.audit.wait(found, what="an audit event")
        (event,) = found()
        return event

    def reply_to(self, source: SourceCoordinate) -> tuple[str, InferenceReply]:
        """The one reply to this record, and its topic."""
        ((topic, reply),) = (
            (self.replies.topic_of[request_id], reply)
            for request_id, found in self.replies.by_id.items()
            for reply in found
            if reply.source == source
        )
        return topic, reply

    def letter_of(self, source: SourceCoordinate) -> Message:
        """The one dead letter of this record."""

        def found() -> list[Message]:
            return [letter for letter in self.pipeline.dead_letters(self.letters) if source_of(letter) == source]

        self.letters.wait(found, what="a dead letter")
        (letter,) = found()
        return letter

    def read_to_end(self) -> None:
        """Take in whatever was written twice, too."""
        for reader in (self.audit, self.letters):
            reader.read_to_end()
        self.replies.read_to_end()


def source_of(letter: Message) -> SourceCoordinate:
    return SourceCoordinate(
        header(letter, headers.DLT_ORIGINAL_TOPIC),
        int(header(letter, headers.DLT_ORIGINAL_PARTITION)),
        int(header(letter, headers.DLT_ORIGINAL_OFFSET)),
    )
