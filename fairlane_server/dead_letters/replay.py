"""Replays of dead letters: the new request, the mark on the letter and the audit, in one transaction per letter."""

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from fairlane import names
from fairlane.clock import ClockMs
from fairlane.closing import Closing
from fairlane.cluster import LastConnectionError, one_line, quiet_config, reason_of
from fairlane.codec import Codec
from fairlane.dead_letters import position_name
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import transactional_producer
from fairlane.names import dead_letter_replay_id, is_request_id, tenant_of_request_topic
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, InferenceRequest, SourceCoordinate, WorkItem
from fairlane.settings import KafkaSettings
from fairlane_server.dead_letters.letters import Letter, mark_headers
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import TopicRefusal, backoff_s, close_producer, while_retriable


class NotReplayableError(Exception):
    """No request can be made of this letter; the message says why and quotes nothing of it."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A letter and the new request that replaces it, which goes to the topic of the first one.

    ``source`` is the position of the letter's request on its tenant's topic; ``replayed_id`` is its id, while
    ``request.replay_of`` is the id of the first request if that one was a replay itself.
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
        unreadable = letter.content is None
        reason = f"it cannot be read: {letter.problem}" if unreadable else f"it holds no request ({letter.kind})"
        raise NotReplayableError(reason)
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


MOST_TENANTS = 100
"""Each has a client with threads and connections of its own, from the beginning to the end."""
_TIMEOUT_MS = 10_000
_CALL_TIMEOUT_S = 20.0
_LOOK_UP_TIMEOUT_S = 8.0
_TRIES = 5
_SLOW_TRIES = 2
"""Of a call that a blocked transactional id lets wait for its whole time."""
_DROPPED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Errors of records that the client dropped for another reason."""

_FENCED = frozenset({KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED})


class NotReplayedError(Exception):
    """One letter could not be replayed and its transaction was aborted; others may be. The message says why."""


class Replayer(Closing):
    """Publishes replays. For one thread. Each tenant has a producer of its own: with the producer id of one that writes
    its topics, which Kafka does not check, it can block that one for good."""

    def __init__(self, settings: KafkaSettings, codec: Codec, actor: str, clock: ClockMs) -> None:
        self._settings = settings
        self._codec = codec
        self._actor = actor
        self._clock = clock
        self._producers: dict[str, Producer] = {}
        self._blocked: dict[str, str] = {}
        """Tenants that nothing more can be sent for, and why."""
        self._known: set[str] = set()

    def fence(self, tenants: Collection[str]) -> None:
        """Fence earlier replays for these tenants: their commits are then in the log, and no further ones follow.

        Raises ClusterError when no transaction can be begun for any of them, or when they are too many.
        """
        if len(tenants) > MOST_TENANTS:
            raise ClusterError(f"there are letters of {len(tenants)} tenants: choose at most {MOST_TENANTS} (--tenant)")
        for tenant in tenants:
            errors = LastConnectionError()
            config = transactional_producer(self._settings, dead_letter_replay_id(tenant), _TIMEOUT_MS)
            producer = self._producers[tenant] = KafkaProducer(quiet_config(config, errors))
            try:
                while_retriable(partial(producer.init_transactions, _CALL_TIMEOUT_S), _SLOW_TRIES)
            except KafkaException as error:
                self._block(tenant, f"no transaction can be begun: {errors.text or reason_of(error)}")
        if tenants and self._blocked.keys() >= {*tenants}:
            raise ClusterError(next(iter(self._blocked.values())))

    def send(self, replay: Replay) -> SourceCoordinate:
        """Publish the request, the mark and the audit, all or none, for a tenant for which others were fenced. Returns
        the position of the request.

        Raises NotReplayedError when this letter cannot be sent and ClusterError when none can.
        """
        if (why := self._blocked.get(replay.tenant)) is not None:
            raise NotReplayedError(why)
        producer = self._producers[replay.tenant]
        self._look_up(producer, replay.topic)
        for attempt in count(1):
            try:
                return self._transaction(producer, replay)
            except KafkaException as error:
                cause = _cause_of(producer, error.args[0])
            self._abort(producer, replay, cause)
            # After a refused record the client may fail the next one although nothing is wrong with it.
            if attempt == _TRIES or TopicRefusal.of(cause).lasting:
                break
            time.sleep(backoff_s(attempt))
        raise NotReplayedError(cause.str())

    def close(self) -> None:
        """Disconnect. An open transaction, as after Ctrl-C, is aborted."""
        for producer in self._producers.values():
            close_producer(producer)

    def _block(self, tenant: str, why: str) -> None:
        self._blocked[tenant] = why
        close_producer(self._producers.pop(tenant))

    def _transaction(self, producer: Producer, replay: Replay) -> SourceCoordinate:
        now_ms = self._clock()
        producer.begin_transaction()
        # The mark goes first: if the tenant's topic refuses the request, the transaction must hold something to be
        # aborted.
        _deliver(producer, mark_record(replay))
        place = _deliver(producer, request_record(replay, self._codec))
        for record in audit_records(replay, place, self._codec, self._actor, now_ms):
            _deliver(producer, record)
        while_retriable(partial(producer.commit_transaction, _CALL_TIMEOUT_S), _TRIES)
        return place

    def _look_up(self, producer: Producer, topic: str) -> None:
        """Check that the topic exists: producing to a missing one would wait for it. Raises NotReplayedError,
        ClusterError."""
        if topic in self._known:
            return
        try:
            found = producer.list_topics(topic, _LOOK_UP_TIMEOUT_S).topics.get(topic)
        except KafkaException as error:
            raise ClusterError(f"{topic}: {reason_of(error)}") from None
        if found is None or found.error is not None:
            reason = "no such topic" if found is None or found.error is None else found.error.str()
            raise NotReplayedError(f"{topic}: {reason}")
        self._known.add(topic)

    def _abort(self, producer: Producer, replay: Replay, cause: KafkaError) -> None:
        """Abort the transaction. Raises NotReplayedError when nothing more can be sent for this tenant after it, and
        ClusterError when nothing more can be sent for anybody."""
        problem = cause
        if not cause.fatal():
            try:
                while_retriable(partial(producer.abort_transaction, _CALL_TIMEOUT_S), _SLOW_TRIES)
            except KafkaException as error:
                problem = error.args[0]
            else:
                return
        if problem.fatal() and problem.code() in _FENCED:
            # A tenant that writes with a later epoch of this producer's id looks the same, and stops its own letters.
            self._block(replay.tenant, "another replay was started for this tenant, or its topic refuses this one")
            if not self._producers:
                raise ClusterError("another replay was started, so this one has stopped; what it replayed stands")
            raise NotReplayedError(self._blocked[replay.tenant])
        text = f"{one_line(cause.str())}; and its transaction cannot be aborted: {one_line(problem.str())}"
        try:
            producer.list_topics(replay.topic, _LOOK_UP_TIMEOUT_S)
        except KafkaException:
            raise ClusterError(f"the replay has stopped: {text}; what it replayed stands") from None
        self._block(replay.tenant, text)
        raise NotReplayedError(text)


def _deliver(producer: Producer, record: OutputRecord) -> SourceCoordinate:
    """Write a record and wait for its acknowledgement. Raises KafkaException."""
    results: list[tuple[KafkaError | None, SourceCoordinate]] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        place = SourceCoordinate(record.topic, message.partition() or 0, message.offset() or 0)
        results.append((error, place))

    producer.produce(
        record.topic,
        value=record.value,
        key=record.key,
        headers=list(record.headers),
        partition=-1 if record.partition is None else record.partition,
        on_delivery=delivered,
    )
    try:
        producer.flush(_CALL_TIMEOUT_S)
    except SystemError as error:
        # On a fatal error the client raises and still calls back, which Python reports as a fault of the callback.
        raise error.__cause__ or error from None
    if not results:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{record.topic} did not acknowledge"))
    ((failure, place),) = results
    if failure is not None:
        raise KafkaException(failure)
    return place


def _cause_of(producer: Producer, failure: KafkaError) -> KafkaError:
    """Why a transaction failed: for a topic that it may not write, the client reports only that it dropped the
    record."""
    if failure.code() not in _DROPPED:
        return failure
    try:
        # This call is refused in any case; its error says what is wrong with the transaction, if anything.
        producer.begin_transaction()
    except KafkaException as error:
        found: KafkaError = error.args[0]
        return found if found.txn_requires_abort() else failure
    return failure
