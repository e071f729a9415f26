"""`fairlane explain` over tables that the recorder's own code filled."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fairlane.names import LEDGER_AUDIT, LEDGER_USAGE, replies_topic
from fairlane.outcomes import Decision
from fairlane.records import (
    AuditEvent,
    InferenceReply,
    Output,
    PassageReference,
    SourceCoordinate,
    Timings,
    TokenUsage,
    UsageEvent,
)
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.cli import main
from fairlane_server.postgres.migrations import upgrade
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.stack import PostgresServer

ID = "5f0c2f2e-1f43-4b3e-9f5e-6f6e2b8a0001"
SECRET = "the text of the answer"
T0 = 1_760_000_000_000

Run = Callable[..., tuple[int, str, str]]
Recorded = Callable[..., None]


@pytest.fixture
def run(database: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fairlane explain` against the test's database: exit status, what it printed, what it complained about."""
    monkeypatch.setenv("POSTGRES_DSN", database.operator_dsn)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["explain", *arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run_command


@pytest.fixture
def record(database: PostgresServer) -> Iterator[Recorded]:
    """Stores records as the recorder would."""
    upgrade(Settings(postgres_owner_dsn=database.owner_dsn))
    store = RecorderStore(database.recorder_dsn)
    offsets = iter(range(1_000))

    def write(*records: tuple[str, object, int]) -> None:
        encoded = [
            LogRecord(topic, 0, next(offsets), at_ms, None, default_codec().encode(value))
            for topic, value, at_ms in records
        ]
        projection = project(encoded, default_codec())
        assert not projection.skipped
        store.write(projection, {})

    yield write
    store.close()


def decided(decision: str, at_ms: int, tenant: str = "acme", offset: int = 7, **inputs: str) -> tuple[str, object, int]:
    source = SourceCoordinate(f"requests.{tenant}", 0, offset)
    event = AuditEvent(ID, tenant, decision, "dispatcher-1", T0 + at_ms, source, inputs=inputs)
    return LEDGER_AUDIT, event, T0 + at_ms


def answered(timings: tuple[int, ...], at_ms: int, tenant: str = "acme", offset: int = 7) -> tuple[str, object, int]:
    reply = InferenceReply(
        ID,
        tenant,
        "ok",
        model="words",
        model_version="1",
        task="generate",
        engine="simulated",
        output=Output(text=SECRET),
        finish_reason="stop",
        usage=TokenUsage(30, 10),
        timings=Timings(*(T0 + value for value in timings)),
        batch_size=8,
        degradations=("fewer_passages",),
        passages=(PassageReference("p1", 0.5),),
        source=SourceCoordinate(f"requests.{tenant}", 0, offset),
    )
    return replies_topic(tenant), reply, T0 + at_ms


def served(record: Recorded) -> None:
    """A request that went all the way."""
    work = SourceCoordinate("priority.generate.normal", 1, 5)
    usage = UsageEvent(
        *(ID, "acme", "generate", "words", "1", "normal", "ok", None),
        *(30, 10, 0, 70, 40, T0 + 1_090),
        work,
    )
    record(
        decided(
            "accepted", 3, predicted_wait_ms="1000", rank_at_most="2", cost_tokens="70", deadline_at_ms=str(T0 + 30_000)
        ),
        decided("degraded", 3, steps="fewer_passages", level="1"),
        decided("dispatched", 1_010, waited_ms="1007", partition="priority.generate.normal-1"),
        (LEDGER_USAGE, usage, T0 + 1_090),
        answered((0, 3, 1_010, 1_015, 1_050, 1_090), 1_095),
    )


def test_a_story_is_printed_as_a_timeline_without_any_text_of_the_request(run: Run, record: Recorded) -> None:
    served(record)
    code, text, complaint = run(ID)
    assert (code, complaint) == (0, "")
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(f"request {ID}\ntenant acme, requests.acme-0@7, 2025-10-09 08:53:20.000 UTC\nstate: ok\n")
    assert [line[0] for line in lines if line[0].startswith("+")] == [
        *("+0", "+3", "+3", "+1,010", "+1,015", "+1,050", "+1,090", "+1,095"),
    ]
    for words in (
        "cost 70 tokens, deadline +30,000 ms, predicted wait 1,000 ms, rank at most 2",
        "level 1, steps fewer_passages",
        "partition priority.generate.normal-1, waited 1,007 ms",
        "engine simulated, batch size 8",
        "estimated cost 70 tokens, spent cost 50 tokens",
        "degradations fewer_passages, passages 1",
    ):
        assert words in " ".join(text.split()), words
    assert SECRET not in text
    code, text, _ = run(ID, "--json")
    assert SECRET not in text
    (place,) = json.loads(text)["places"]
    assert (place["tenant"], place["state"], place["began_at_ms"]) == ("acme", "ok", T0)
    assert [event["offset_ms"] for event in place["events"]] == [0, 3, 3, 1_010, 1_015, 1_050, 1_090, 1_095]
    accepted = place["events"][1]
    assert (accepted["event"], accepted["actor"]) == ("accepted", "dispatcher-1")
    assert accepted["details"]["rank_at_most"] == "2"


def test_places_of_one_id_are_told_apart_and_a_tenant_sees_its_own(run: Run, record: Recorded) -> None:
    served(record)
    record(
        decided(Decision.DUPLICATE, 5_000, offset=9, replayed="true"),
        decided(Decision.ACCEPTED, 6_000, tenant="globex", offset=1),
        decided(Decision.ACCEPTED, 7_000, offset=10, rank_at_most="0"),
    )
    places = json.loads(run(ID, "--json")[1])["places"]
    assert [(place["tenant"], place["source"]["offset"], place["state"]) for place in places] == [
        ("acme", 7, "ok"),
        ("acme", 9, "duplicate"),
        ("globex", 1, "waiting"),
        ("acme", 10, "waiting"),
    ]
    assert "(3 of 4 places with this id)" in run(ID)[1]
    (place,) = json.loads(run(ID, "--tenant", "globex", "--json")[1])["places"]
    assert place["tenant"] == "globex"
    code, text, complaint = run(ID, "--tenant", "initech")
    assert (code, text) == (1, "")
    assert complaint == (
        f"error: nothing is recorded of request {ID} of tenant initech: a wrong id, or the recorder is behind\n"
    )


def test_an_unknown_id_is_an_error(run: Run, record: Recorded) -> None:
    served(record)
    for wrong in ("no-such-id", ID[:-1], ID.upper(), "' OR ''='"):
        code, text, complaint = run(wrong)
        assert (code, text) == (1, "")
        assert complaint == (f"error: nothing is recorded of request {wrong}: a wrong id, or the recorder is behind\n")
    assert run("")[0] == 1
    assert "no tenant can have this name" in run(ID, "--tenant", "*")[2]


def test_a_record_cannot_steer_the_terminal(run: Run, record: Recorded) -> None:
    topic, event, at_ms = decided(Decision.REFUSED, 1, field="\x1b[2J")
    assert isinstance(event, AuditEvent)
    record((topic, replace(event, message="\x1b]0;owned\x07[red]no\x00"), at_ms))
    text = run(ID)[1]
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]no" in text


def test_what_is_wrong_with_postgres_is_one_line(
    run: Run, database: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text, complaint = run(ID)
    assert (code, text) == (1, "")
    assert complaint.endswith(": there are no tables; `fairlane db upgrade` makes them\n")
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://fairlane:hush@127.0.0.1:1/fairlane")
    code, _, complaint = run(ID)
    assert code == 1
    assert complaint.startswith("error: fairlane@127.0.0.1:1/fairlane: ")
    assert complaint.count("\n") == 1
    assert "hush" not in complaint
