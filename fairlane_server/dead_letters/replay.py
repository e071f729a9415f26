"""Records of a replay: the new request, the mark on the letter, and the audit of both ids. Pure."""

from dataclasses import dataclass, replace

from fairlane import names
from fairlane.codec import Codec
from fairlane.dead_letters import Letter, mark_headers, position_name
from fairlane.names import is_request_id, tenant_of_request_topic
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, InferenceRequest, SourceCoordinate, WorkItem
from fairlane_server.kafka.settlement import OutputRecord


class NotReplayableError(Exception):
    """No request can be made of this letter; the message says why and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A letter and the request that replaces it.

    Attributes:
        letter: position of the letter.
        key: its key.
        source: position of the letter's request on its tenant's topic.
        tenant: owner of that topic.
        topic: where the new request goes: the topic of the first one.
        request: the new request.
        replayed_id: the id of the request in the letter; ``request.replay_of`` is the id of the first request if the
            one in the letter was a replay itself.
        exception: the class of the exception that made it a dead letter.
    """

    letter: SourceCoordinate
    key: bytes | None
    source: SourceCoordinate
    tenant: str
    topic: str
    request: InferenceRequest
    replayed_id: str
    exception: str | None = None


def make_replay(letter: Letter, new_id: str) -> Replay:
    """Build the letter's request under a new id and otherwise unchanged: the same reply topic, and a deadline that
    starts anew. Raises NotReplayableError."""
    request = letter.request
    if request is None:
        raise NotReplayableError(_why_not(letter))
    source = letter.content.source if isinstance(letter.content, WorkItem) else letter.original
    if source is None:
        raise NotReplayableError("its headers do not say where it stood")
    try:
        tenant = tenant_of_request_topic(source.topic)
    except ValueError:
        raise NotReplayableError("it did not stand on a tenant's topic, so nobody knows whose it is") from None
    if any(said is not None and said != tenant for said in (letter.tenant, request.tenant)):
        raise NotReplayableError(f"it names another tenant than the one whose topic it stood on, {tenant}")
    if not is_request_id(request.request_id):
        raise NotReplayableError("its request id is no UUID")
    first_id = request.request_id
    if request.replay_of is not None and is_request_id(request.replay_of):
        first_id = request.replay_of
    return Replay(
        letter=letter.place,
        key=letter.record.key,
        source=source,
        tenant=tenant,
        topic=source.topic,
        request=replace(request, request_id=new_id, replay_of=first_id),
        replayed_id=request.request_id,
        exception=letter.exception,
    )


def _why_not(letter: Letter) -> str:
    if letter.content is None:
        return f"it cannot be read: {letter.problem}"
    return f"it holds no request ({letter.kind})"


def request_record(replay: Replay, codec: Codec) -> OutputRecord:
    return OutputRecord(replay.topic, replay.request.request_id.encode(), codec.encode(replay.request))


def mark_record(replay: Replay) -> OutputRecord:
    """The mark behind the letter, which keeps it from being replayed twice."""
    letter = replay.letter
    marks = mark_headers(letter, replay.request.request_id)
    return OutputRecord(letter.topic, replay.key, b"", marks, letter.partition)


def audit_records(
    replay: Replay, place: SourceCoordinate, codec: Codec, actor: str, now_ms: int
) -> tuple[OutputRecord, OutputRecord]:
    """The audit events of both ids: of the new request, written at ``place``, and of the one in the letter."""
    letter = position_name(replay.letter)
    exception = {} if replay.exception is None else {"exception": replay.exception}
    begun = AuditEvent(
        request_id=replay.request.request_id,
        tenant=replay.tenant,
        decision=Decision.REPLAYED,
        actor=actor,
        occurred_at_ms=now_ms,
        source=place,
        inputs={
            "letter": letter,
            "replay_of": replay.request.replay_of or replay.replayed_id,
            "replayed_id": replay.replayed_id,
            **exception,
        },
    )
    ended = replace(
        begun,
        request_id=replay.replayed_id,
        source=replay.source,
        inputs={"letter": letter, "replayed_as": replay.request.request_id, **exception},
    )
    key = replay.tenant.encode()
    return (
        OutputRecord(names.LEDGER_AUDIT, key, codec.encode(begun)),
        OutputRecord(names.LEDGER_AUDIT, key, codec.encode(ended)),
    )


class ReplayRate:
    """Rate limiter without bursts: unused time is not saved up."""

    def __init__(self, per_s: float) -> None:
        self._interval_s = 1 / per_s
        self._next_at_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self._next_at_s - now_s)

    def went(self, now_s: float) -> None:
        self._next_at_s = now_s + self._interval_s
