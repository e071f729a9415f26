"""The client for threads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

from fairlane.client.core import ClientCore, ClientLimits, ClientStats
from fairlane.client.handle import Handle
from fairlane.client.requests import RequestFields, build_request
from fairlane.client.seams import Connector, KafkaConnector
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.names import is_name, is_replies_of, replies_topic
from fairlane.records import InferenceRequest
from fairlane.settings import KafkaSettings

if TYPE_CHECKING:
    from fairlane.client.reply_stream import ReplyStream, UndecodableReply

SubmitItem = InferenceRequest | RequestFields
"""What ``submit_many`` takes: a request, or a mapping with the fields of ``submit``."""


class BaseClient:
    """What both clients are made from.

    Args:
        tenant: who publishes; requests go to ``requests.<tenant>``.
        bootstrap_servers: brokers to start from; default: ``KAFKA_BOOTSTRAP_SERVERS``.
        service: read ``replies.<tenant>.<service>`` instead of ``replies.<tenant>``, and have requests answered there.
        settings: the connection, with its security; default: from the environment.
        max_in_flight: most requests submitted and not answered; then submit waits.
        max_buffered_bytes: most bytes published and not acknowledged; then submit waits.
        max_request_bytes: largest encoded request. The default is the limit of a tenant's request topic.
        submit_timeout_ms: how long submit waits for room before it raises Backpressure.
        start_timeout_ms: how long the first submit waits for a broker before it raises Unavailable.
        close_timeout_ms: how long ``close`` waits for requests to be acknowledged.
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
        max_request_bytes: int = 4 * 1024 * 1024,
        submit_timeout_ms: int = 30_000,
        start_timeout_ms: int = 10_000,
        close_timeout_ms: int = 10_000,
        connector: Connector | None = None,
    ) -> None:
        limits = ClientLimits(
            max_in_flight=max_in_flight,
            max_buffered_bytes=max_buffered_bytes,
            max_request_bytes=max_request_bytes,
            submit_timeout_ms=submit_timeout_ms,
            start_timeout_ms=start_timeout_ms,
            close_timeout_ms=close_timeout_ms,
        )
        for name, value in (("tenant", tenant), ("service", service)):
            if value is not None and not is_name(value):
                raise ValueError(f"{name}: {value!r} is not lower-case letters, digits and hyphens")
        for name in ("max_in_flight", "max_buffered_bytes", "max_request_bytes"):
            if getattr(limits, name) < 1:
                raise ValueError(f"{name}: {getattr(limits, name)} is below 1")
        self._settings = settings or KafkaSettings()
        if bootstrap_servers is not None:
            self._settings = self._settings.model_copy(update={"kafka_bootstrap_servers": bootstrap_servers})
        self._service = service
        self._core = ClientCore(
            tenant, service, connector or KafkaConnector(self._settings), self._make_codec, limits, now_ms
        )

    @property
    def tenant(self) -> str:
        """Who publishes."""
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
        from fairlane.registry import codec_for

        return codec_for(self._settings)

    def _request_of(self, item: SubmitItem, index: int) -> InferenceRequest:
        try:
            if isinstance(item, InferenceRequest):
                return item
            if isinstance(item, Mapping):
                return build_request(**cast("RequestFields", item))
            raise TypeError(f"not a request, nor a mapping of its fields: {type(item).__name__}")
        except (TypeError, ValueError) as error:
            error.add_note(f"item {index} of submit_many")
            raise
