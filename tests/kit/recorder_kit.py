"""What the recorder's tests share: records on the log, tables to look into, and a way to cut the database off."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from confluent_kafka import KafkaError, Producer

from fairlane.kafka_config import transactional_producer
from fairlane.names import replies_topic
from fairlane.records import InferenceReply, Output, SourceCoordinate, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.postgres.connection import ALL_TENANTS, act_for
from fairlane_server.topics.admin import apply_plan, read_state
from fairlane_server.topics.families import expand, load_families
from fairlane_server.topics.plan import plan
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

_READ_BY_RECORDER = (
    *("replies.", "gateway.replies", "jobs.replies", "evaluation.replies"),
    *("ledger.", "control.tenants", "control.models"),
)
_TIMEOUT_S = 20.0


def make_topics(bootstrap_servers: str, *tenants: TenantSpec) -> None:
    """Create what the recorder reads, unless it is there: the shared topics and the reply topics of these tenants."""
    families = [family for family in load_families() if family.name.startswith(_READ_BY_RECORDER)]
    wanted = expand(families, tenants, ())
    cluster = ClusterAdmin(KafkaSettings(kafka_bootstrap_servers=bootstrap_servers))
    state = read_state(cluster, [topic.name for topic in wanted])
    changes = plan(
        wanted,
        state.topics,
        families=families,
        broker_config=state.broker_config,
        replication_factor=1,
    )
    failed = [item for item in apply_plan(cluster, changes) if item.result == "failed"]
    assert not failed, failed


def delete_reply_topics(bootstrap_servers: str, prefix: str) -> None:
    """Delete the reply topics of every tenant whose name begins like this."""
    admin = ClusterAdmin(KafkaSettings(kafka_bootstrap_servers=bootstrap_servers)).admin
    topics = [name for name in admin.list_topics(timeout=_TIMEOUT_S).topics if name.startswith(replies_topic(prefix))]
    delete_topics(bootstrap_servers, *topics)


def delete_topics(bootstrap_servers: str, *topics: str) -> None:
    """And come back when they are gone."""
    admin = ClusterAdmin(KafkaSettings(kafka_bootstrap_servers=bootstrap_servers)).admin
    for deleted in admin.delete_topics(list(topics), operation_timeout=_TIMEOUT_S).values():
        deleted.result(_TIMEOUT_S)
    gone = set(topics)
    # The broker may still be deleting them when it has answered.
    eventually(lambda: not gone & admin.list_topics(timeout=_TIMEOUT_S).topics.keys(), what="the end of the topics")


def reply_to(tenant: str, number: int, **fields: Any) -> InferenceReply:
    """The reply to a tenant's request with this number."""
    defaults: dict[str, Any] = {
        "outcome": "ok",
        "output": Output(text=f"answer {number}"),
        "source": SourceCoordinate(f"requests.{tenant}", 0, number),
    }
    return InferenceReply(f"{tenant}-{number}", tenant, **(defaults | fields))


class LogWriter:
    """Writes records in transactions, as the dispatcher and the consumers do."""

    def __init__(self, bootstrap_servers: str, unique: str) -> None:
        settings = KafkaSettings(kafka_bootstrap_servers=bootstrap_servers)
        self._producer = Producer(transactional_producer(settings, f"{unique}-writer", 60_000))
        self._producer.init_transactions(_TIMEOUT_S)

    def write(self, topic: str, values: Sequence[object], *, commit: bool = True, key: str | None = None) -> list[int]:
        """One transaction with these records (bytes and None as they are). Returns their offsets."""
        offsets: list[int] = []

        def delivered(error: KafkaError | None, message: Any) -> None:
            if error is None:
                offsets.append(message.offset())

        self._producer.begin_transaction()
        for value in values:
            raw = value if value is None or isinstance(value, bytes) else default_codec().encode(value)
            self._producer.produce(topic, raw, key, on_delivery=delivered)
            self._producer.poll(0)
        # An aborted record is in the log only if it was sent before.
        self._producer.flush(_TIMEOUT_S)
        if commit:
            self._producer.commit_transaction(_TIMEOUT_S)
        else:
            self._producer.abort_transaction(_TIMEOUT_S)
        assert len(offsets) == len(values)
        return offsets

    def close(self) -> None:
        """Disconnect."""
        self._producer.close()

    def replies(self, tenant: str, numbers: Sequence[int], per_transaction: int = 100) -> None:
        """The replies of a tenant with these numbers, on its reply topic."""
        for start in range(0, len(numbers), per_transaction):
            chunk = numbers[start : start + per_transaction]
            self.write(replies_topic(tenant), [reply_to(tenant, number) for number in chunk])


class Tables:
    """The projection as the owner of the tables sees it: no service reads all of it."""

    def __init__(self, server: PostgresServer) -> None:
        self._dsn = server.owner_dsn

    def rows(self, query: str, *parameters: object, tenant: str = ALL_TENANTS) -> list[tuple[Any, ...]]:
        """The rows of a query, for a tenant."""
        with psycopg.connect(self._dsn, connect_timeout=5) as connected:
            act_for(connected, tenant)
            return connected.execute(query.encode(), parameters).fetchall()

    def count(self, tenant: str) -> int:
        """How many results a tenant has."""
        return int(self.rows("SELECT count(*) FROM results WHERE tenant = %s", tenant)[0][0])

    def assert_exactly(self, tenant: str, numbers: Sequence[int]) -> None:
        """Every one of these replies is there once, was seen once, and nothing else is there."""
        rows = self.rows(
            "SELECT request_id, source_offset, output->>'text', replies_seen, replays_seen FROM results"
            " WHERE tenant = %s ORDER BY source_offset",
            tenant,
        )
        assert rows == [(f"{tenant}-{number}", number, f"answer {number}", 1, 0) for number in numbers]


@dataclass(frozen=True, slots=True)
class _Pair:
    near: socket.socket
    far: socket.socket

    def close(self) -> None:
        for end in (self.near, self.far):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """A TCP proxy that can cut every connection and refuse new ones, and stop doing so."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._lock = threading.Lock()
        self._open = True
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Break every connection, and every new one as soon as it is made."""
        with self._lock:
            self._open = False
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def restore(self) -> None:
        """Let connections through again."""
        with self._lock:
            self._open = True

    def close(self) -> None:
        """End it."""
        self.cut()
        # A blocked accept does not notice that its socket was closed by another thread.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if not self._open:
                    near.close()
                    continue
                pair = _Pair(near, socket.create_connection(self._target, 5))
                self._pairs.append(pair)
            for source, sink in ((pair.near, pair.far), (pair.far, pair.near)):
                thread = threading.Thread(target=_pump, args=(source, sink, pair), daemon=True)
                self._threads.append(thread)
                thread.start()


def _pump(source: socket.socket, sink: socket.socket, pair: _Pair) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            sink.sendall(data)
    pair.close()


@contextmanager
def proxied(dsn: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of a database, and the connection string through it."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    given = conninfo_to_dict(dsn)
    proxy = Proxy(str(given["host"]), int(given["port"] or 5432))
    try:
        yield proxy, make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
    finally:
        proxy.close()
