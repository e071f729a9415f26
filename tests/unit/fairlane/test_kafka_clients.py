"""Clients of Kafka take the credentials that their file holds; they are all made in one place."""

import ast
import gc
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer

from deploy.local.layout import PROJECT_ROOT
from fairlane import kafka_clients
from fairlane.kafka_clients import CredentialsWatch, KafkaAdmin, KafkaConsumer, KafkaProducer
from fairlane.kafka_config import connection, idempotent_producer, read_committed_consumer
from fairlane.kafka_credentials import KafkaCredentials
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.transactional_producer import TransactionalProducers
from tests.kit.waiting import eventually

SERVICES = ("inference_consumers", "producers", "stream_processors")
FIRST, SECOND = KafkaCredentials("first", "secret one"), KafkaCredentials("second", "secret two")


class Taker:
    def __init__(self) -> None:
        self.taken: list[tuple[str, str]] = []

    def set_sasl_credentials(self, username: str, password: str) -> None:
        self.taken.append((username, password))


class RefusingTaker(Taker):
    def set_sasl_credentials(self, username: str, password: str) -> None:
        raise RuntimeError("Handle has been closed")


class Source:
    def __init__(self) -> None:
        self.now = FIRST

    def __call__(self) -> KafkaCredentials:
        return self.now


def thread_of(watch: CredentialsWatch) -> threading.Thread:
    thread = watch._thread
    assert thread is not None
    return thread


def test_changed_credentials_reach_every_client_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    watch, source, takers, refusing = CredentialsWatch(0.01), Source(), [Taker(), Taker()], RefusingTaker()
    for taker in (refusing, *takers):
        watch.add(taker, source, FIRST)
    thread = thread_of(watch)
    source.now = SECOND
    eventually(lambda: all(taker.taken for taker in takers), what="the new credentials")
    source.now = FIRST
    eventually(lambda: all(len(taker.taken) > 1 for taker in takers), what="the first ones again")
    for taker in (refusing, *takers):
        watch.remove(taker)
    thread.join(10)
    assert [taker.taken for taker in takers] == [[("second", "secret two"), ("first", "secret one")]] * 2
    assert caplog.messages.count("kafka_credentials_not_taken client=RefusingTaker reason=Handle has been closed") == 2
    assert caplog.messages.count("kafka_credentials_replaced username=second clients=2") == 1
    assert "secret" not in caplog.text


def test_the_thread_ends_after_the_last_client_and_begins_with_the_next_one() -> None:
    watch, source = CredentialsWatch(0.01), Source()
    collected, removed = Taker(), Taker()
    watch.add(collected, source, FIRST)
    watch.add(removed, source, FIRST)
    thread = thread_of(watch)
    watch.remove(removed)
    del collected
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    watch.add(again := Taker(), source, FIRST)
    source.now = SECOND
    eventually(lambda: again.taken, what="the new credentials")
    watch.remove(again)


def test_a_removed_client_is_not_called() -> None:
    watch, source, closed, other = CredentialsWatch(0.01), Source(), Taker(), Taker()
    watch.add(closed, source, FIRST)
    watch.add(other, source, FIRST)
    watch.remove(closed)
    source.now = SECOND
    eventually(lambda: other.taken, what="the new credentials")
    assert closed.taken == []
    watch.remove(other)


def settings_in(folder: Path) -> KafkaSettings:
    file = folder / "user.env"
    file.write_text("KAFKA_SASL_USERNAME=first\nKAFKA_SASL_PASSWORD=secret one\n")
    return KafkaSettings(
        kafka_bootstrap_servers="127.0.0.1:1",
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism="SCRAM-SHA-512",
        kafka_credentials_file=file,
    )


def test_each_kind_of_client_is_watched_until_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    added: list[object] = []
    removed: list[object] = []
    watch = CredentialsWatch()
    monkeypatch.setattr(watch, "add", lambda client, source, given: added.append((client, source(), given)))
    monkeypatch.setattr(watch, "remove", removed.append)
    monkeypatch.setattr(kafka_clients, "credentials_watch", watch)
    producer = KafkaProducer(idempotent_producer(settings) | {"log_level": 0})
    consumer = KafkaConsumer(read_committed_consumer(settings, "group") | {"log_level": 0})
    admin = KafkaAdmin(connection(settings) | {"log_level": 0})
    given = KafkaCredentials("first", "secret one")
    assert added == [(client, given, given) for client in (producer, consumer, admin)]
    producer.close()
    consumer.close()
    assert removed == [producer, consumer]


def test_producers_of_transactions_keep_their_credentials_and_others_take_their_place(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    producers = TransactionalProducers(settings, ("one", "other"), 10_000)
    first = producers.make()
    assert len(first) == 2
    assert producers.renewed() is None
    file = settings.kafka_credentials_file
    assert file is not None
    file.write_text("KAFKA_SASL_USERNAME=second\nKAFKA_SASL_PASSWORD=secret two\n")
    made: list[Sequence[Producer]] = []

    def are_renewed() -> bool:
        if (renewed := producers.renewed()) is not None:
            made.append(renewed)
        return bool(made)

    eventually(are_renewed, what="other producers")
    assert producers.renewed() is None
    for producer in (*first, *made[0]):
        producer.close()


def test_a_consumer_that_is_polled_all_the_time_takes_them_between_two_polls(tmp_path: Path) -> None:
    """Without that, the call from another thread would wait for ever: each poll keeps it out."""
    consumer = KafkaConsumer(read_committed_consumer(settings_in(tmp_path), "group") | {"log_level": 0})
    polled, stopping = threading.Event(), threading.Event()

    def poll() -> None:
        while not stopping.is_set():
            consumer.poll(0.2)
            polled.set()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        assert polled.wait(10)
        setting = threading.Thread(target=consumer.set_sasl_credentials, args=("second", "secret two"), daemon=True)
        setting.start()
        setting.join(10)
        assert not setting.is_alive()
        eventually(lambda: consumer._new_credentials is None, what="the next poll")
    finally:
        stopping.set()
        thread.join(10)
    consumer.set_sasl_credentials("third", "secret three")
    assert consumer._new_credentials is None
    consumer.close()


def test_a_client_made_from_an_older_configuration_has_the_present_credentials(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    config = read_committed_consumer(settings, "group")
    (tmp_path / "user.env").write_text("KAFKA_SASL_USERNAME=second\nKAFKA_SASL_PASSWORD=secret two\n")
    own, _, given = kafka_clients._present(config)
    assert given == KafkaCredentials("second", "secret two")
    assert (own["sasl.username"], own["sasl.password"]) == ("second", "secret two")


def test_every_client_of_the_product_is_made_there() -> None:
    """Calls of confluent-kafka's own classes are nowhere else."""
    plain = {"Producer", "Consumer", "AdminClient", "ConfluentConsumer", "DeserializingConsumer", "SerializingProducer"}
    found = [
        f"{path.relative_to(PROJECT_ROOT)}:{node.lineno}"
        for folder in ("fairlane", "fairlane_server", *SERVICES, "deploy", "benchmarks")
        for path in sorted((PROJECT_ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")) in plain
    ]
    assert found == []
