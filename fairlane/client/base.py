"""Base of the sync and asyncio clients: arguments, and opening a stream of replies."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypedDict, TypeVar

from fairlane.client.connector import KafkaConnector
from fairlane.client.core import ClientCore, ClientLimits, ClientStats
from fairlane.client.group_member import GroupMember, OnUndecodable
from fairlane.client.reply_service import ReplyLetters
from fairlane.client.requests import RequestFields, build_request
from fairlane.client.retry_policies import NO_RETRIES, HandlerRetries, RetryPolicy
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.committed import TopicIds
from fairlane.errors import Timeout, Unavailable
from fairlane.names import dead_letter_replies_topic, is_name, is_replies_of, replies_topic, tenant_group
from fairlane.record_bounds import MAX_REQUEST_VALUE_BYTES
from fairlane.records import InferenceRequest
from fairlane.settings import KafkaSettings

LEAST_PROCESSING_MS = 10_000
_MAX_PROCESSING_MS = 300_000

SubmitItem = InferenceRequest | RequestFields
"""What ``submit_many`` takes: a request, or a mapping with the fields of ``submit``."""


class ReplyOptions(TypedDict, total=False):
    """Options of ``replies`` besides the group, by keyword.

    Fields:
        topic: the reply topic to read; default: the client's own.
        service: instead of ``topic``: read ``replies.<tenant>.<service>``.
        from_beginning: where a group that never read here starts: with the oldest reply kept (default), or with those
            that come from now on.
        on_error: called with each record that is no reply, which is then skipped; if it raises, the iteration ends with
            that error and the record is read again. Default: it is logged and skipped. For ``replies`` alone: to a
            service, such a record is a dead letter.
        idle_timeout_ms: end the iteration when nothing came for this long; default: never.
        max_processing_ms: how long a reply may take to be handled, with all waits between tries, before its partition
            goes to another member.
        dead_letters: read the tenant's dead letters instead, the replies that its services could not handle. For
            ``replies`` alone.
    """

    topic: str | None
    service: str | None
    from_beginning: bool
    on_error: OnUndecodable | None
    idle_timeout_ms: int | None
    max_processing_ms: int
    dead_letters: bool


OnDeadLetterT = TypeVar("OnDeadLetterT")


class ServiceOptions(ReplyOptions, Generic[OnDeadLetterT], total=False):
    """Options of ``serve_replies`` besides the group and the handler: those of ``replies``, but for ``on_error`` and
    ``dead_letters``, and these.

    Fields:
        retries: how often the handler is called and after which waits; default: :class:`HandlerRetries`.
        on_dead_letter: takes each reply that the handler failed on at every try, and each record that is no reply,
            as a :class:`DeadLetter`; if it raises, ``run`` ends with that and the record comes again. Default: they
            are written to ``dead-letter.replies.<tenant>``.
    """

    retries: HandlerRetries | None
    on_dead_letter: OnDeadLetterT | None


class BaseClient:
    """Base of both clients.

    Args:
        tenant: who publishes; requests go to ``requests.<tenant>``.
        bootstrap_servers: brokers to start from; default: ``KAFKA_BOOTSTRAP_SERVERS``.
        service: read ``replies.<tenant>.<service>`` instead of ``replies.<tenant>``, and have requests answered there.
        settings: the connection, with its security; default: from the environment.
        max_in_flight: most requests submitted and not answered; then submit waits.
        max_buffered_bytes: most bytes published and not acknowledged; then submit waits.
        max_request_bytes: largest encoded request. The default is the maximum: 4 MiB, the limit of a request topic,
            less 8 KiB for the key and the headers.
        submit_timeout_ms: how long submit waits for room before it raises Backpressure.
        start_timeout_ms: how long the first submit waits for a broker before it raises Unavailable.
        close_timeout_ms: how long ``close`` waits for requests to be acknowledged.
        retries: how often and for how long requests are tried again that were refused for now or lost on their way to
            the log; default: never.
        offline: requests go to ``backfill.<tenant>``: they wait for free capacity instead of being shed, and feedback
            goes with them. Without a ``timeout_ms`` their deadline is that of offline requests.
        connector: makes the Kafka clients; for tests.

    Raises:
        ValueError: a name cannot be a tenant's or a service's, or a bound is below 1.
    """

    def __init__(
        self,
        tenant: str,
        bootstrap_servers: str | None = None,
        service: str | None = None,
        settings: KafkaSettings | None = None,
        *,
        max_in_flight: int = 10_000,
        max_buffered_bytes: int = 64 * 1024 * 1024,
        max_request_bytes: int = MAX_REQUEST_VALUE_BYTES,
        submit_timeout_ms: int = 30_000,
        start_timeout_ms: int = 10_000,
        close_timeout_ms: int = 10_000,
        retries: RetryPolicy = NO_RETRIES,
        offline: bool = False,
        connector: KafkaConnector | None = None,
    ) -> None:
        limits = ClientLimits(
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
            max_request_bytes=max_request_bytes,
            submit_timeout_ms=submit_timeout_ms,
            start_timeout_ms=start_timeout_ms,
            close_timeout_ms=close_timeout_ms,
            offline=offline,
        )
        for name, value in (("tenant", tenant), ("service", service)):
            if value is not None and not is_name(value):
                raise ValueError(f"{name}: {value!r} is not lower-case letters, digits and hyphens")
        for name in ("max_in_flight", "max_buffered_bytes", "max_request_bytes"):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name}: {getattr(limits, name)} is below 1")
        if max_request_bytes > MAX_REQUEST_VALUE_BYTES:
            raise ValueError(
                f"max_request_bytes: {max_request_bytes} is above the request topic's {MAX_REQUEST_VALUE_BYTES}"
            )
        self._settings = settings or KafkaSettings()
        if bootstrap_servers is not None:
            self._settings = self._settings.model_copy(update={"kafka_bootstrap_servers": bootstrap_servers})
        self._connector = connector or KafkaConnector(self._settings)
        self._core = ClientCore(tenant, service, self._connector, self._make_codec, limits, retries, now_ms)
        self._members: weakref.WeakSet[GroupMember] = weakref.WeakSet()

    @property
    def tenant(self) -> str:
        """The tenant that publishes."""
        return self._core.tenant

    @property
    def reply_topic(self) -> str:
        """The topic whose replies reach the handles."""
        return self._core.reply_topic

    @property
    def stats(self) -> ClientStats:
        """Counts since the client was made."""
        return self._core.stats

    def _make_codec(self) -> Codec:
        from fairlane.schema_registry import RegistryError, codec_for

        try:
            return codec_for(self._settings)
        except RegistryError as error:
            raise Unavailable(str(error)) from error

    def _request_of(self, item: SubmitItem) -> InferenceRequest:
        if isinstance(item, InferenceRequest):
            return item
        if isinstance(item, Mapping):
            return build_request(**item)
        raise TypeError(f"not a request, nor a mapping of its fields: {type(item).__name__}")

    def _bounded(self, ahead: int) -> int:
        if ahead < 1:
            raise ValueError(f"ahead: {ahead} is below 1")
        return min(ahead, self._core.limits.max_in_flight)

    @staticmethod
    def _none_in_time(count: int, timeout_s: float | None) -> Timeout:
        return Timeout(f"none of {count} requests: no reply within {timeout_s:g} s")

    def _member(self, group_id: str, options: ReplyOptions) -> GroupMember:
        self._core.handles.raise_if_ended()
        topic, service = options.get("topic"), options.get("service")
        dead_letters = options.get("dead_letters", False)
        if sum((topic is not None, service is not None, dead_letters)) > 1:
            raise ValueError("topic: give one of topic, service and dead_letters")
        if dead_letters:
            topic = dead_letter_replies_topic(self.tenant)
        elif topic is None:
            topic = self.reply_topic if service is None else replies_topic(self.tenant, service)
        if not dead_letters and not is_replies_of(topic, self.tenant):
            raise ValueError(f"topic: {topic!r} is no reply topic of {self.tenant!r}")
        if not group_id:
            raise ValueError("group_id: empty")
        max_processing_ms = options.get("max_processing_ms", _MAX_PROCESSING_MS)
        if max_processing_ms < LEAST_PROCESSING_MS:
            raise ValueError(f"max_processing_ms: {max_processing_ms} is below {LEAST_PROCESSING_MS}")
        idle_timeout_ms = options.get("idle_timeout_ms")
        consumer = self._connector.member(tenant_group(self.tenant, group_id), max_processing_ms, LEAST_PROCESSING_MS)
        member = GroupMember(
            consumer,
            topic,
            self._make_codec(),
            from_beginning=options.get("from_beginning", True),
            on_undecodable=options.get("on_error"),
            idle_timeout_s=None if idle_timeout_ms is None else idle_timeout_ms / 1_000,
            start_timeout_s=self._start_timeout_s,
            topic_ids=TopicIds(self._settings),
        )
        consumer.on_unreadable = member.passed_over
        self._members.add(member)
        return member

    def _served(
        self, group_id: str, options: ServiceOptions[OnDeadLetterT]
    ) -> tuple[GroupMember, HandlerRetries, ReplyLetters | None]:
        """The member that a service reads with, its retries, and the writer of its dead letters without a callback."""
        if options.get("dead_letters", False):
            raise ValueError("dead_letters: a service would read again what it puts there; use replies")
        if options.get("on_error") is not None:
            raise ValueError("on_error: to a service, what is no reply is a dead letter; use on_dead_letter")
        retries = options.get("retries") or HandlerRetries()
        max_processing_ms = options.get("max_processing_ms", _MAX_PROCESSING_MS)
        if retries.longest_total_ms >= max_processing_ms:
            raise ValueError(
                f"retries: waits of {retries.longest_total_ms} ms in all, and max_processing_ms is {max_processing_ms}"
            )
        letters = None
        if options.get("on_dead_letter") is None:
            letters = ReplyLetters(self._connector.letter_producer(), self.tenant, tenant_group(self.tenant, group_id))
        return self._member(group_id, options), retries, letters

    @property
    def _start_timeout_s(self) -> float:
        return self._core.limits.start_timeout_ms / 1_000


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an exception, which names the item that it is about."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


class BaseReplyStream:
    """Base of both streams of replies."""

    def __init__(self, member: GroupMember) -> None:
        self._member = member

    @property
    def topic(self) -> str:
        """The topic it reads."""
        return self._member.topic

    @property
    def undecodable(self) -> int:
        """Records that were not valid replies."""
        return self._member.undecodable

    @property
    def trace(self) -> dict[str, str]:
        """Trace context of the latest reply's request, by header. Empty without one."""
        return self._member.trace
