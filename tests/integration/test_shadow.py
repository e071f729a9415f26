"""A shadow on a real broker and a real Postgres: its copies reach the table of evaluation, and nothing else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane import names
from fairlane.outcomes import Outcome
from fairlane.records import TenantSpec
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.evaluation.shadow_report import read_shadow_counts, read_shadow_report
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.kit.deployment import default_model
from tests.kit.pipeline import Pipeline
from tests.kit.shadow_kit import Copies, recorded, start_shadow, stop_shadow
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(180)]

REQUESTS = 40


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str, migrated: PostgresServer) -> Iterator[Pipeline]:
    champion = default_model(unique, f"{unique}-pool")
    tenants = (TenantSpec("a", evaluation="allowed"), TenantSpec("b"))
    models = (champion, replace(champion, version="2"))
    with Pipeline(broker, tmp_path, unique, tenants=tenants, models=models) as made:
        made.name_versions()
        yield made


def ask(pipeline: Pipeline, tenant: str, count: int = REQUESTS) -> list[str]:
    """Requests that are answered one after another, so that the pool is idle between them."""
    replies, asked = pipeline.replies(tenant), []
    for _ in range(count):
        request = pipeline.request(timeout_ms=60_000)
        pipeline.publish(tenant, request)
        assert replies.wait([request.request_id])[request.request_id].outcome == Outcome.OK
        asked.append(request.request_id)
    return asked


def counts(dsn: str, table: str, tenant: str, model: str) -> int:
    """Rows of a pipeline's own model: the recorder reads those of all pipelines of the broker."""
    with connect(dsn, "tests") as connection:
        act_for(connection, ALL_TENANTS)
        query = f"SELECT count(*) FROM {table} WHERE tenant = %s AND model = %s"  # noqa: S608 - our own names
        row = connection.execute(query.encode(), (tenant, model)).fetchone()
        return int(row[0]) if row else 0


def wait_for_rows(dsn: str, table: str, tenant: str, model: str, count: int) -> None:
    eventually(lambda: counts(dsn, table, tenant, model) == count, what=f"{count} rows of {tenant} in {table}")


def test_copies_reach_the_results_of_evaluation_and_nothing_of_the_tenant(
    pipeline: Pipeline, migrated: PostgresServer
) -> None:
    pipeline.recorder(postgres_dsn=migrated.recorder_dsn).wait_ready()
    pipeline.start()
    # Until a run was measured, no rate is known that a shadow could have a share of.
    before = {tenant: ask(pipeline, tenant, 2) for tenant in ("a", "b")}
    shadow = start_shadow(pipeline, "2")
    copies = Copies(pipeline, shadow.run)
    asked = ask(pipeline, "a")
    denied = ask(pipeline, "b")
    stop_shadow(pipeline)
    eventually(copies.made, what="copies")
    ends = copies.wait_all_ended()

    a, b, model = pipeline.tenant("a"), pipeline.tenant("b"), pipeline.models[0].model
    made = copies.made()
    assert {item.evaluation.tenant for item in made if item.evaluation} == {a}, "no tenant without consent"
    assert {item.evaluation.request_id for item in made if item.evaluation} <= set(asked)
    assert len(made) > REQUESTS / 2
    assert {reply.outcome for reply in ends.values()} == {Outcome.OK}
    assert {reply.model_version for reply in ends.values()} == {"2"}

    eventually(lambda: len(recorded(migrated.owner_dsn, shadow.run)) == len(made), what="the rows of all copies")
    rows = recorded(migrated.owner_dsn, shadow.run)
    assert {(row["tenant"], row["arm"], row["kind"], row["ended"]) for row in rows} == {
        (a, "candidate", "shadow", "completed")
    }
    assert {row["replies_seen"] for row in rows} == {1}

    # What the tenants see is what they would see without it.
    for tenant, wanted in (("a", [*before["a"], *asked]), ("b", [*before["b"], *denied])):
        replies = pipeline.replies(tenant)
        replies.read_to_end()
        assert replies.counts == dict.fromkeys(wanted, 1)
        whole = pipeline.tenant(tenant)
        for table in ("results", "usage"):
            wait_for_rows(migrated.owner_dsn, table, whole, model, len(wanted))
    wait_for_rows(migrated.owner_dsn, "usage", names.EVALUATION_TENANT, model, len(made))
    assert counts(migrated.owner_dsn, "results", names.EVALUATION_TENANT, model) == 0

    settings = Settings(postgres_dsn=migrated.operator_dsn)
    report = read_shadow_report(settings, shadow.run)
    assert report.counts.ended == {"completed": len(made)}
    assert report.counts.sampled["copied"] == len(made)
    # The dispatcher hears of the shadow a moment after it was published.
    assert 2 * REQUESTS - 5 <= sum(report.counts.sampled.values()) <= 2 * REQUESTS
    assert report.counts.sampled["not_allowed"] == REQUESTS
    (task,) = report.tasks
    assert (task.task, task.pairs, task.equal.mean, task.similarity.mean) == ("generate", len(made), 1.0, 1.0)
    assert task.completion_tokens is not None
    assert task.completion_tokens.ratio == 1.0

    # Consent that was withdrawn since shows nothing any more.
    pipeline.tenants[a] = replace(pipeline.tenants[a], evaluation="denied")
    pipeline.apply()
    eventually(lambda: not read_shadow_report(settings, shadow.run).tasks, what="the withdrawn consent")
    assert set(read_shadow_counts(settings, shadow.run).sampled) >= {"copied"}
    assert b in pipeline.tenants


def test_an_erased_request_is_erased_with_its_copies_also_those_to_come(
    pipeline: Pipeline, migrated: PostgresServer
) -> None:
    pipeline.recorder(postgres_dsn=migrated.recorder_dsn).wait_ready()
    pipeline.start()
    ask(pipeline, "a", 2)
    shadow = start_shadow(pipeline, "2")
    asked = ask(pipeline, "a", 6)
    stop_shadow(pipeline)
    copies = Copies(pipeline, shadow.run)
    made = {item.evaluation.request_id for item in copies.made() if item.evaluation}
    assert made
    copies.wait_all_ended()
    eventually(lambda: len(recorded(migrated.owner_dsn, shadow.run)) == len(made))
    gone = sorted(made)[0]
    assert gone in asked
    with Erasures(migrated.gateway_dsn, pipeline.tenant("a"), kept_ms=86_400_000) as erasures:
        erasure = erasures.request(ErasureKind.REQUESTS, [gone], "key:1")
        while erasures.step(erasure):
            pass
    left = {row["request_id"] for row in recorded(migrated.owner_dsn, shadow.run)}
    assert left == made - {gone}
