"""Readiness of each kind of server: a function that returns None when it is ready, otherwise why not."""

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ClusterMetadata

PROBE_TIMEOUT_S = 2.0


def tcp(host: str, port: int, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Whether something accepts connections at `host:port`."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return None


def http_ok(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Whether `GET url` answers 200."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 - our own http:// address
            status = response.status
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    return None if status == 200 else f"{url} answers {status}"


def kafka(
    bootstrap_servers: str, timeout_s: float = PROBE_TIMEOUT_S, config: Mapping[str, Any] | None = None
) -> str | None:
    """Whether a Kafka broker answers at one of `bootstrap_servers` and takes part in its cluster. ``config``:
    librdkafka's, to log in."""
    # A broker that still waits to be unfenced answers with an empty list of brokers.
    return _ask_kafka(
        bootstrap_servers,
        timeout_s,
        lambda _client, metadata: None if metadata.brokers else "no broker has joined the cluster",
        config,
    )


def kafka_node(address: str, timeout_s: float = PROBE_TIMEOUT_S, config: Mapping[str, Any] | None = None) -> str | None:
    """Whether the Kafka broker at `address`, its advertised `host:port`, takes part in its cluster, and its data can be
    read. ``timeout_s``: for each of two requests; ``config``: librdkafka's, to log in."""

    def check(client: "AdminClient", metadata: "ClusterMetadata") -> str | None:
        from confluent_kafka import TopicPartition
        from confluent_kafka.admin import OffsetSpec

        node = {f"{broker.host}:{broker.port}": broker.id for broker in metadata.brokers.values()}.get(address)
        if node is None:
            return "it has not joined the cluster"
        latest: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # its stubs leave it out
        led = {}
        for topic in metadata.topics.values():
            for partition in topic.partitions.values():
                if partition.leader < 0 and node in partition.replicas:
                    return f"partition {partition.id} of {topic.topic} has no leader"
                if partition.leader == node:
                    led[TopicPartition(str(topic.topic), partition.id)] = latest
        # A new leader does not know how much of its log the others have, and reports no end offset.
        for answer in client.list_offsets(led, request_timeout=timeout_s).values() if led else ():
            answer.result(timeout_s + 1)
        return None

    return _ask_kafka(address, timeout_s, check, config)


def _ask_kafka(
    bootstrap_servers: str,
    timeout_s: float,
    check: "Callable[[AdminClient, ClusterMetadata], str | None]",
    config: Mapping[str, Any] | None = None,
) -> str | None:
    """The result of `check`, or why the cluster does not answer."""
    from confluent_kafka import KafkaException

    from fairlane.kafka_clients import KafkaAdmin

    # The client logs each refused connection on stderr; ask the socket first.
    problems = [tcp(host, port, timeout_s) for host, port in split_addresses(bootstrap_servers)]
    if None not in problems:
        return "; ".join(problem for problem in problems if problem is not None) or "no address given"
    own: dict[str, Any] = {"bootstrap.servers": bootstrap_servers, "log_level": 0, "socket.timeout.ms": 2000}
    client = KafkaAdmin({**(config or {}), **own})
    try:
        return check(client, client.list_topics(timeout=timeout_s))
    except KafkaException as error:
        return str(error.args[0].str())
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"


def postgres(dsn: str, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Whether `dsn` lets us in and answers a query."""
    import psycopg

    try:
        with psycopg.connect(dsn, connect_timeout=max(1, int(timeout_s)), autocommit=True) as connection:
            connection.execute("SELECT 1")
    except psycopg.Error as error:
        return _first_line(error)
    return None


def redis(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Whether the Redis at `url` answers PING."""
    from pydantic import SecretStr
    from redis import RedisError

    from fairlane_server.redis.client import blocking_redis_client

    try:
        with blocking_redis_client(SecretStr(url), timeout_s) as client:
            client.ping()
    except RedisError as error:
        return _first_line(error)
    return None


def split_addresses(bootstrap_servers: str) -> list[tuple[str, int]]:
    """`host:port,host:port` as pairs; a port left out is Kafka's 9092."""
    addresses = [urlsplit(f"//{part.strip()}") for part in bootstrap_servers.split(",") if part.strip()]
    return [(address.hostname or "localhost", address.port or 9092) for address in addresses]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
