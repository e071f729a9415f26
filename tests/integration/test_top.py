"""`fairlane top` on a real broker, with control topics of its own."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from fairlane import names
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.kafka_config import idempotent_producer
from fairlane.records import CapacityReport, ClassLoad, DispatchReport, PoolLoad, ShedCount, TenantLoad, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane_server import cli
from fairlane_server.kafka import load_board, load_feed
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.topics.admin import apply_plan, read_state
from fairlane_server.topics.families import expand, load_families
from fairlane_server.topics.plan import plan

pytestmark = pytest.mark.broker

Run = Callable[..., tuple[int, str, str]]
Say = Callable[..., None]


@pytest.fixture
def run(broker: str, unique: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fairlane top` over the test's own topics: exit status, what it printed, what it complained about."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", broker)
    for name in ("CONTROL_TENANTS", "CONTROL_CAPACITY", "CONTROL_DISPATCH"):
        monkeypatch.setattr(load_feed, name, f"{unique}.{getattr(names, name)}")

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["top", *arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run_command


@pytest.fixture
def say(broker: str, unique: str, tmp_path: Path) -> Iterator[Say]:
    """Publishes control records on topics of this test."""
    settings = KafkaSettings(kafka_bootstrap_servers=broker)
    text = "families:\n"
    for family, record in (("tenants", "TenantSpec"), ("capacity", "CapacityReport"), ("dispatch", "DispatchReport")):
        text += (
            f"  control-{family}:\n    name: {unique}.control.{family}\n    description: d\n    records: [{record}]\n"
            "    key: instance_id\n    partitions: 1\n    retention_ms: 600000\n    writers: [operator]\n"
            "    readers: [operator]\n"
        )
    file = tmp_path / "topics.yaml"
    file.write_text(text)
    families = load_families(file)
    cluster = ClusterAdmin(settings)
    state = read_state(cluster, [])
    wanted = expand(families, (), ())
    made = plan(wanted, state.topics, families=families, broker_config=state.broker_config, replication_factor=1)
    assert all(item.result == "done" for item in apply_plan(cluster, made))
    producer = Producer(idempotent_producer(settings))

    def publish(record: Any, value: bytes | None = None) -> None:
        match record:
            case TenantSpec():
                topic, key = "tenants", record.tenant
            case CapacityReport():
                topic, key = "capacity", record.instance_id
            case _:
                topic, key = "dispatch", record.instance_id
        producer.produce(f"{unique}.control.{topic}", value or default_codec().encode(record), key)
        assert producer.flush(10) == 0

    yield publish
    producer.close()


def consumer(name: str, at_ms: int, *, draining: bool = False) -> CapacityReport:
    return CapacityReport(
        *(name, "gpu", ("words",), "healthy", draining, 9_000.0, 900.0, 32, 16_384, 0.5, 3, 300, at_ms), 1_000.0
    )


def dispatcher(started_at_ms: int, at_ms: int, served: int) -> DispatchReport:
    tenant = TenantLoad("acme", "gpu", 8, 1_500, 700, served, 0.5, 120.0, (ShedCount("overloaded", 4),))
    pool = PoolLoad("gpu", 4_000, 1.0, 1_500, (ClassLoad("normal", 1.0, 8, 1_500),), served_tokens=served)
    return DispatchReport("d1", started_at_ms, at_ms, draining=False, pools=(pool,), tenants=(tenant,))


def test_one_picture_is_one_object(run: Run, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second command may begin later than a report counts.
    for name in ("DISPATCH_TTL_MS", "CAPACITY_TTL_MS"):
        monkeypatch.setattr(load_board, name, 60_000)
    now = now_ms()
    say(TenantSpec("acme", weight=2.0))
    say(TenantSpec("idle"))
    say(consumer("c1", now))
    say(consumer("c1", now), b"\x93 nobody can read this")
    say(consumer("c2", now))
    say(consumer("c2", now + 1, draining=True))
    start = now_ms()
    say(dispatcher(start, start, 5_000))
    say(dispatcher(start, start + 500, 6_000))
    code, text, complaint = run("--once", "--json")
    assert (code, complaint) == (0, "")
    view = json.loads(text)
    assert view["trouble"] is None
    (pool,) = view["pools"]
    assert (pool["pool"], pool["consumers"], pool["capacity_tokens_per_s"], pool["window_tokens"]) == (
        *("gpu", 1, 1_000.0, 4_000),
    )
    assert (pool["waiting_by_class"], pool["dispatchers"], pool["in_flight_tokens"]) == ({"normal": 8}, 1, 1_500)
    acme, idle = view["tenants"]
    assert (acme["tenant"], acme["weight"], acme["tokens_per_s"], acme["served_share"]) == ("acme", 2.0, 2_000.0, 1.0)
    assert acme["shed"] == {"overloaded": 4}
    assert (idle["tenant"], idle["pool"]) == ("idle", None)
    code, text, _ = run("--once")
    assert code == 0
    assert all(words in text for words in ("dispatchers: 1", "gpu", "4,000", "acme", "2,000", "overloaded 4", "idle"))


def test_a_deployment_that_says_nothing_is_an_empty_picture(run: Run, say: Say) -> None:
    code, text, complaint = run("--once", "--json")
    assert (code, complaint) == (0, "")
    view = json.loads(text)
    assert (code, view["dispatchers"], view["pools"], view["tenants"]) == (0, 0, [], [])


def test_it_shows_a_picture_though_heartbeats_never_pause(run: Run, say: Say) -> None:
    """The broker shows the end of a log only to a reader who finds nothing there."""
    stopping = threading.Event()

    def report() -> None:
        for _ in range(4_000):
            if stopping.wait(0.01):
                break
            say(consumer("c1", now_ms()))

    # One there is before anybody looks.
    say(consumer("c1", now_ms()))
    reporter = threading.Thread(target=report)
    reporter.start()
    try:
        code, text, complaint = run("--once", "--json")
    finally:
        stopping.set()
        reporter.join()
    assert (code, complaint) == (0, "")
    assert [pool["consumers"] for pool in json.loads(text)["pools"]] == [1]


def test_it_goes_on_until_it_is_interrupted(run: Run, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = load_feed.LoadFeed.follow
    pictures = 0

    def interrupted(feed: load_feed.LoadFeed, duration_s: float) -> None:
        nonlocal pictures
        pictures += 1
        if pictures == 3:
            raise KeyboardInterrupt
        say(consumer("c1", now_ms()))
        follow(feed, duration_s)

    monkeypatch.setattr(load_feed.LoadFeed, "follow", interrupted)
    code, text, complaint = run("--json", "--interval", "0.3")
    assert (code, complaint) == (0, "")
    views = [json.loads(line) for line in text.splitlines()]
    assert [sum(pool["consumers"] for pool in view["pools"]) for view in views] == [0, 1, 1]


def test_a_registry_that_does_not_answer_is_shown_until_it_does(
    run: Run, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(TenantSpec("acme", weight=2.0))
    monkeypatch.setattr(load_feed, "_REGISTRY_REST_S", 0.0)
    follow, decode_any = load_feed.LoadFeed.follow, Codec.decode_any
    pictures = 0

    def decoded(codec: Codec, record_types: tuple[Any], data: bytes | None, *, may_ask: bool = True) -> object:
        if record_types == (TenantSpec,) and pictures < 2:
            raise RegistryError("the registry does not answer")
        return decode_any(codec, record_types, data, may_ask=may_ask)

    def followed(feed: load_feed.LoadFeed, duration_s: float) -> None:
        nonlocal pictures
        pictures += 1
        if pictures == 3:
            raise KeyboardInterrupt
        say(consumer("c1", now_ms()))
        follow(feed, duration_s)

    monkeypatch.setattr(Codec, "decode_any", decoded)
    monkeypatch.setattr(load_feed.LoadFeed, "follow", followed)
    code, text, complaint = run("--json", "--interval", "0.3")
    assert (code, complaint) == (0, "")
    views = [json.loads(line) for line in text.splitlines()]
    assert [view["trouble"] for view in views] == ["the registry does not answer"] * 2 + [None]
    assert [sum(pool["consumers"] for pool in view["pools"]) for view in views] == [0, 1, 1]
    assert [[tenant["weight"] for tenant in view["tenants"]] for view in views] == [[], [], [2.0]]


def test_a_lost_broker_is_seen_in_every_form(run: Run, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_feed.LoadFeed, "trouble", "no broker answers")
    code, text, _ = run("--once", "--json")
    assert (code, json.loads(text)["trouble"]) == (0, "no broker answers")
    code, text, _ = run("--once")
    assert code == 0
    assert "nothing comes in: no broker answers" in text

    def interrupted(_feed: load_feed.LoadFeed, _duration_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load_feed.LoadFeed, "follow", interrupted)
    code, text, _ = run("--json")
    assert (code, [json.loads(line)["trouble"] for line in text.splitlines()]) == (0, ["no broker answers"])


def test_a_missing_topic_is_one_line(run: Run, unique: str) -> None:
    code, text, complaint = run("--once")
    assert (code, text) == (1, "")
    assert complaint == (f"error: {unique}.control.tenants: no such topic; `fairlane topics apply` creates it\n")
