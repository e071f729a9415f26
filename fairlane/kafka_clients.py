"""All clients of Kafka, which take new credentials from their file without a restart.

librdkafka uses new credentials for the next connection that it opens; open connections keep the user that opened them
until the broker or the client closes them (``connections.max.reauth.ms`` of a broker bounds that time). One thread of
the process looks at the files: it starts with the first client whose credentials are in a file, and ends after the last
one was closed or collected.
"""

import logging
import threading
from collections.abc import Callable
from time import sleep
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from confluent_kafka import Consumer, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from fairlane.cluster import reason_of
from fairlane.kafka_config import CREDENTIALS_SOURCE, ClientConfig
from fairlane.kafka_credentials import KafkaCredentials

# Not structlog: the client's package logs through the application's logging.
log = logging.getLogger(__name__)

CredentialsSource = Callable[[], KafkaCredentials | None]

_LOOK_EVERY_S: Final = 1.0


class TakesCredentials(Protocol):
    """A client that uses other credentials from its next connection on. Called from the watching thread."""

    def set_sasl_credentials(self, username: str, password: str) -> None: ...


class CredentialsWatch:
    """Gives clients the credentials of their source when these change. It keeps no client alive."""

    def __init__(self, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._look_every_s = look_every_s
        self._lock = threading.Lock()
        self._given: WeakKeyDictionary[TakesCredentials, tuple[CredentialsSource, KafkaCredentials]]
        self._given = WeakKeyDictionary()
        """By client: where its credentials come from, and those it has."""
        self._thread: threading.Thread | None = None

    def add(self, client: TakesCredentials, source: CredentialsSource, given: KafkaCredentials) -> None:
        """Watch ``source`` for this client, which was made with ``given``."""
        with self._lock:
            self._given[client] = source, given
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kafka-credentials", daemon=True)
                self._thread.start()

    def remove(self, client: TakesCredentials) -> None:
        """Never call this client again. Returns when no call is under way: it may be closed then."""
        with self._lock:
            self._given.pop(client, None)

    def _run(self) -> None:
        while True:
            sleep(self._look_every_s)
            self._look()
            with self._lock:
                if not self._given:
                    self._thread = None
                    return

    def _look(self) -> None:
        with self._lock:
            clients = list(self._given)
        # Held until the end, so that none is destroyed under the lock.
        present: dict[CredentialsSource, KafkaCredentials | None] = {}
        changed: dict[str, int] = {}
        for client in clients:
            with self._lock:
                if client not in self._given:
                    continue
                source, given = self._given[client]
                now = present[source] if source in present else present.setdefault(source, source())
                if now is None or now == given:
                    continue
                self._given[client] = source, now
                try:
                    client.set_sasl_credentials(now.username, now.password)
                except (KafkaException, RuntimeError) as error:
                    kind = type(client).__name__
                    log.error("kafka_credentials_not_taken client=%s reason=%s", kind, reason_of(error))
                else:
                    changed[now.username] = changed.get(now.username, 0) + 1
        for username, number in changed.items():
            log.info("kafka_credentials_replaced username=%s clients=%d", username, number)


credentials_watch: Final = CredentialsWatch()
"""Of this process."""


class KafkaProducer(Producer):
    """A producer made from a configuration of ``fairlane.kafka_config``. With ``keeps_credentials`` it keeps those that
    it began with."""

    def __init__(self, config: ClientConfig, *, keeps_credentials: bool = False, **more: Any) -> None:
        own, source, given = _present(config)
        super().__init__(own, **more)
        if not keeps_credentials:
            _watch(self, source, given)

    def close(self) -> bool:
        credentials_watch.remove(self)
        return super().close()


class KafkaConsumer(Consumer):
    """A consumer made from a configuration of ``fairlane.kafka_config``."""

    def __init__(self, config: ClientConfig, **more: Any) -> None:
        own, source, given = _present(config)
        super().__init__(own, **more)
        # A call of confluent-kafka's consumer keeps out those of other threads, and a loop that polls leaves no gap for
        # them: new credentials are taken between two polls.
        self._polling = threading.RLock()
        self._new_credentials: tuple[str, str] | None = None
        _watch(self, source, given)

    def poll(self, timeout: float = -1) -> Message | None:
        with self._polling:
            self._take_credentials()
            return super().poll(timeout)

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:
        with self._polling:
            self._take_credentials()
            return super().consume(num_messages, timeout)

    def set_sasl_credentials(self, username: str, password: str) -> None:
        """Use these from the next connection on: at once, or, while it is polled, from the next poll on."""
        self._new_credentials = (username, password)
        if self._polling.acquire(blocking=False):
            try:
                self._take_credentials()
            finally:
                self._polling.release()

    def close(self) -> None:
        credentials_watch.remove(self)
        super().close()

    def _take_credentials(self) -> None:
        if self._new_credentials is not None:
            new, self._new_credentials = self._new_credentials, None
            super().set_sasl_credentials(*new)


class KafkaAdmin(AdminClient):
    """An admin client made from a configuration of ``fairlane.kafka_config``."""

    def __init__(self, config: ClientConfig, **more: Any) -> None:
        own, source, given = _present(config)
        super().__init__(own, **more)
        _watch(self, source, given)


def watch_credentials(client: TakesCredentials, config: ClientConfig) -> None:
    """Tell ``client`` of new credentials, if those of the configuration are in a file. They may be new already."""
    _, source, given = _present(config)
    _watch(client, source, given)


def _watch(client: TakesCredentials, source: CredentialsSource | None, given: KafkaCredentials | None) -> None:
    if source is not None and given is not None:
        credentials_watch.add(client, source, given)


def _present(config: ClientConfig) -> tuple[ClientConfig, CredentialsSource | None, KafkaCredentials | None]:
    """The configuration for librdkafka, with the credentials of now: a configuration may be older than its client."""
    own = dict(config)
    source: CredentialsSource | None = own.pop(CREDENTIALS_SOURCE, None)
    given = None if source is None else source()
    if given is not None:
        own |= {"sasl.username": given.username, "sasl.password": given.password}
    return own, source, given
