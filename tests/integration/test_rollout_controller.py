"""The controller of rollouts on a real broker and a real Postgres: what it reads, what it decides, and what stays
recorded of it."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fairlane.clock import now_ms
from fairlane.names import CONTROL_MODELS, LEDGER_AUDIT, LEDGER_FEEDBACK, replies_topic
from fairlane.outcomes import Decision
from fairlane.records import AuditEvent, Cost, Feedback, InferenceReply, ModelRoute, SourceCoordinate, Timings
from fairlane.rollout_records import Rollout
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.control.published_models import model_topic
from fairlane_server.models.rollout_arms import CANDIDATE_ARM, CONTROL_ARM
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection
from fairlane_server.postgres.rollout_evidence import read_rollout_evidence
from fairlane_server.rollouts.controller import RolloutController
from fairlane_server.rollouts.evidence import OVERDUE_BUCKET, ArmEvidence, Moments, latency_bucket
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.command_kit import MODELS, Run, command_runner, write_deployment
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

TWO_VERSIONS = MODELS + MODELS.removeprefix("models:\n").replace('"1"', '"2"\n    aliases: [next]')
TWO_VERSIONS = TWO_VERSIONS.replace('version: "1"', 'version: "1"\n    aliases: [champion]')
PLAN = "steps: [5, 50, 100]\nleast_step_s: 0\nguards: {least_requests: 20, most_latency_ratio: off}\n"
_numbers = count()


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, f"rollouts{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def run(
    broker: str,
    tables: PostgresServer,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Commands of a deployment that has two versions of one model."""
    write_deployment(tmp_path, unique)
    (tmp_path / "models.yaml").write_text(TWO_VERSIONS.replace("tiny", unique))
    (tmp_path / "plan.yaml").write_text(PLAN)
    made = command_runner(broker, tables.operator_dsn, tmp_path, unique, monkeypatch, capsys)
    assert made("models", "apply")[0] == 0
    return made


@pytest.fixture
def settings(broker: str, tables: PostgresServer, run: Run) -> Settings:
    assert run is not None, "its names of topics are in force"
    return Settings(kafka_bootstrap_servers=broker, postgres_dsn=tables.admin_dsn)


@pytest.fixture
def controller(settings: Settings) -> Iterator[RolloutController]:
    failures: list[BaseException] = []
    made = RolloutController(settings, default_codec(), failures.append)
    # Its log is not what a command prints.
    with capture_logs():
        made.start()
        yield made
        made.stop()
    assert failures == []


def route_of(settings: Settings, model: str) -> ModelRoute:
    record = model_topic(settings, default_codec()).read()[model]
    assert isinstance(record, ModelRoute)
    return record


def reply(model: str, arm: str, latency_ms: int = 50, **fields: Any) -> LogRecord:
    """A reply of an arm on the log."""
    number, at_ms = next(_numbers), now_ms()
    made = InferenceReply(
        f"id-{number}",
        "acme",
        **{
            "outcome": "ok",
            "model": model,
            "model_version": "2" if arm == CANDIDATE_ARM else "1",
            "arm": arm,
            "timings": Timings(submitted_at_ms=at_ms, admitted_at_ms=at_ms),
            "source": SourceCoordinate("requests.acme", 0, number),
            "cost": Cost(1_000, "XTS"),
            **fields,
        },
    )
    return LogRecord(replies_topic("acme"), 0, number, at_ms + latency_ms, None, default_codec().encode(made))


def admission(model: str, arm: str, left_ms: int = 60_000, sticky_key: str | None = None) -> LogRecord:
    """An admission to an arm on the log, of a request that has no reply."""
    number, version = next(_numbers), "2" if arm == CANDIDATE_ARM else "1"
    event = AuditEvent(
        f"id-{number}",
        "acme",
        Decision.DISPATCHED,
        "dispatcher-1",
        now_ms(),
        SourceCoordinate("requests.acme", 0, number),
        None,
        None,
        {
            "arm": arm,
            "version": f"{model}/{version}",
            "sticky_key": sticky_key or str(number),
            "deadline_at_ms": str(now_ms() + left_ms),
        },
    )
    return LogRecord(LEDGER_AUDIT, 0, number, now_ms(), None, default_codec().encode(event))


def rating(rated: LogRecord, score: float) -> LogRecord:
    """Feedback on the log, about what is answered in a reply."""
    about = default_codec().decode_as(InferenceReply, rated.value)
    said = Feedback(about.request_id, about.tenant, score=score, given_by="user:1", given_at_ms=now_ms())
    return LogRecord(LEDGER_FEEDBACK, 0, next(_numbers), now_ms(), None, default_codec().encode(said))


def evidence(tables: PostgresServer, model: str, rollout: Rollout) -> tuple[ArmEvidence, ArmEvidence]:
    """As the admin API's process reads it."""
    kept = ReconnectingConnection(tables.admin_dsn, "test", 10.0)
    with kept.transaction(ALL_TENANTS) as connection:
        found = read_rollout_evidence(connection, model, rollout, now_ms())
    kept.close()
    return found


def write(tables: PostgresServer, records: Sequence[LogRecord]) -> None:
    with closing(RecorderStore(tables.recorder_dsn)) as store:
        store.write(project(records, default_codec()), {})


def started(run: Run, tmp_path: Path, model: str) -> None:
    code, made, complaint = run("rollout", "start", model, "2", "--plan", str(tmp_path / "plan.yaml"))
    assert (code, made["status"], made["champion"]) == (0, "running", "1"), complaint


def test_the_evidence_is_what_the_arms_answered_since_the_step_began(
    run: Run, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    before = reply(unique, CANDIDATE_ARM, outcome="failed", code="engine_error")
    write(tables, [before])
    begins_at_ms = now_ms() + 1
    eventually(lambda: now_ms() > begins_at_ms, what="another millisecond")
    started(run, tmp_path, unique)
    rollout = route_of(settings, unique).rollout
    assert rollout is not None
    rated = [reply(unique, CANDIDATE_ARM, 80) for _ in range(3)]
    of_a_job = SourceCoordinate("backfill.acme", 0, 1)
    write(
        tables,
        [
            *rated,
            reply(unique, CANDIDATE_ARM, 3_600_000, source=of_a_job),
            reply(unique, CANDIDATE_ARM, outcome="failed", code="engine_error"),
            reply(unique, CANDIDATE_ARM, 60_000, outcome="expired", cost=None, model_version=None),
            reply(unique, CANDIDATE_ARM, outcome="rejected", code="overloaded", model_version=None),
            reply(unique, CANDIDATE_ARM, outcome="rejected", code="quota_exceeded", model_version=None),
            reply(unique, CANDIDATE_ARM, outcome="cancelled"),
            reply(unique, CANDIDATE_ARM, model_version="another"),
            reply(unique, CONTROL_ARM, 40),
            reply(unique, "champion", 40),
            reply("another", CANDIDATE_ARM),
            *(admission(unique, CANDIDATE_ARM) for _ in range(2)),
            admission(unique, CANDIDATE_ARM, left_ms=-1),
            admission("another", CONTROL_ARM),
        ],
    )
    write(tables, [rating(one, score) for one, score in zip(rated, (1.0, 0.5, 0.0), strict=True)])
    write(tables, [rating(before, 0.0)])
    candidate, control = evidence(tables, unique, rollout)
    assert (candidate.requests, candidate.failed, candidate.in_flight) == (10, 4, 2)
    assert candidate.latencies == {latency_bucket(80): 3, OVERDUE_BUCKET: 2}
    assert candidate.cost == Moments(4, 4_000, 4_000_000)
    assert candidate.quality == Moments(3, 1.5, 1.25)
    assert (control.requests, control.failed, control.in_flight) == (1, 0, 0)


def test_a_latency_is_of_durations_that_one_clock_measures(
    run: Run, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    started(run, tmp_path, unique)
    rollout = route_of(settings, unique).rollout
    assert rollout is not None
    at_ms = now_ms()
    # The consumer's clock is an hour ahead.
    ahead_ms = at_ms + 3_600_000
    timings = Timings(at_ms, at_ms, at_ms + 30, ahead_ms, ahead_ms + 5, ahead_ms + 50)
    write(tables, [reply(unique, CANDIDATE_ARM, 3_600_100, timings=timings)])
    assert evidence(tables, unique, rollout)[0].latencies == {latency_bucket(80): 1}


def test_requests_of_one_sticky_key_are_counted_together(
    run: Run, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    started(run, tmp_path, unique)
    rollout = route_of(settings, unique).rollout
    assert rollout is not None
    write(tables, [admission(unique, CANDIDATE_ARM, sticky_key=key) for key in ("a", "a", "a", "b")])
    write(tables, [admission(unique, CONTROL_ARM, sticky_key=key) for key in ("c", "d")])
    candidate, control = evidence(tables, unique, rollout)
    assert (candidate.requests, candidate.squared_requests_of_keys) == (4, 10)
    assert (control.requests, control.squared_requests_of_keys) == (2, 2)


def test_costs_in_two_currencies_are_no_evidence(
    run: Run, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    started(run, tmp_path, unique)
    rollout = route_of(settings, unique).rollout
    assert rollout is not None
    write(tables, [reply(unique, CANDIDATE_ARM), reply(unique, CONTROL_ARM, cost=Cost(1, "EUR"))])
    assert [arm.cost.count for arm in evidence(tables, unique, rollout)] == [0, 0]


def test_a_candidate_that_fails_is_rolled_back_with_the_evidence(
    run: Run, controller: RolloutController, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    assert controller is not None
    started(run, tmp_path, unique)
    good = [reply(unique, CONTROL_ARM) for _ in range(30)]
    write(tables, [*good, *(reply(unique, CANDIDATE_ARM, outcome="failed", code="engine_error") for _ in range(30))])
    eventually(lambda: route_of(settings, unique).stopped == ("2",), 30, "the rollback")
    route = route_of(settings, unique)
    assert route.rollout is not None
    assert (route.rollout.status, route.rollout.decided) == ("rolled_back", "rolled_back")
    assert route.changed_by == "rollout controller"
    assert route.reason.startswith("the candidate is worse: errors: ")
    assert (route.aliases, route.revision) == ({"champion": "1", "next": "2"}, 3)
    (errors,) = (finding for finding in route.rollout.findings if finding.guard == "errors")
    assert (errors.verdict, errors.candidate, errors.control) == ("worse", 1.0, 0.0)
    assert errors.lower is not None
    assert errors.lower > 0


def test_a_candidate_that_is_equal_is_promoted_step_by_step(
    run: Run, controller: RolloutController, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    assert controller is not None
    started(run, tmp_path, unique)
    for step in range(2):
        rollout = route_of(settings, unique).rollout
        assert rollout is not None
        assert (rollout.status, rollout.step) == ("running", step)
        write(tables, [reply(unique, arm) for arm in (CANDIDATE_ARM, CONTROL_ARM) for _ in range(2_000)])

        def has_passed(step: int = step) -> bool:
            now = route_of(settings, unique).rollout
            return now is not None and (now.step > step or now.status == "promoted")

        eventually(has_passed, 30, "the end of the step")
    route = route_of(settings, unique)
    assert route.rollout is not None
    assert (route.rollout.status, route.aliases["champion"], route.previous["champion"]) == ("promoted", "2", "1")


def test_a_rollout_waits_for_traffic_and_for_a_person(
    run: Run, controller: RolloutController, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN + "needs_approval: true\n")
    started(run, tmp_path, unique)
    write(tables, [reply(unique, CANDIDATE_ARM) for _ in range(5)])
    assert run("rollout", "pause", unique, "--reason", "lunch")[1]["status"] == "paused"
    assert run("rollout", "resume", unique)[1]["status"] == "running"
    write(tables, [reply(unique, arm) for arm in (CANDIDATE_ARM, CONTROL_ARM) for _ in range(2_000)])

    def has_passed() -> bool:
        latest = controller.latest.get(unique)
        return latest is not None and latest.verdict == "pass"

    eventually(has_passed, 30, "the verdict")
    code, judged, complaint = run("rollout", "verdict", unique)
    assert (code, judged["verdict"]) == (0, "pass"), complaint
    assert run("rollout", "status", unique)[1][unique]["step"] == 0, "nobody has approved"
    assert run("rollout", "approve", unique, "--step", "2")[2] == (
        f"error: {unique}: the rollout is at step 1, not 2\n"
    )
    assert run("rollout", "approve", unique, "--step", "1")[1]["approval"] == "when_passed"

    def step() -> int:
        rollout = route_of(settings, unique).rollout
        return -1 if rollout is None else rollout.step

    eventually(lambda: step() == 1, 30, "the next step")
    code, ended, _ = run("rollout", "abort", unique, "--reason", "enough")
    assert (code, ended["status"], ended["step"]) == (0, "aborted", 1)
    assert run("rollout", "abort", unique)[2] == f"error: {unique}: no rollout is under way\n"


def test_every_decision_can_be_explained(
    run: Run, controller: RolloutController, settings: Settings, tables: PostgresServer, tmp_path: Path, unique: str
) -> None:
    assert controller is not None
    started(run, tmp_path, unique)
    first = route_of(settings, unique)
    write(tables, [reply(unique, CONTROL_ARM) for _ in range(30)])
    write(tables, [reply(unique, CANDIDATE_ARM, outcome="failed", code="engine_error") for _ in range(30)])
    eventually(lambda: route_of(settings, unique).stopped == ("2",), 30, "the rollback")
    last = route_of(settings, unique)
    codec = default_codec()
    changes = [
        LogRecord(CONTROL_MODELS, 0, next(_numbers), now_ms(), unique.encode(), codec.encode(route))
        for route in (first, last)
    ]
    write(tables, changes)
    code, explained, _ = run("rollout", "explain", unique)
    assert code == 0
    decided = [(one["rollout"]["decided"], one["changed_by"]) for one in explained["decisions"]]
    assert decided == [("started", first.changed_by), ("rolled_back", "rollout controller")]
    assert {finding["guard"] for finding in explained["decisions"][1]["rollout"]["findings"]} == {
        "errors",
        "cost",
        "quality",
    }
    assert run("rollout", "explain", unique, "--rollout", "another")[1] == {"decisions": [], "evaluations": []}
