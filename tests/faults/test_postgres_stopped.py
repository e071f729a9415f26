"""Postgres goes away, or hangs, while requests are answered from documents in it: they are answered without them."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

import pytest

from benchmarks.load import LoadGenerator, submitted_within
from fairlane.clock import now_ms
from fairlane.outcomes import Degradation, Outcome, RetrievalReason
from fairlane.records import InferenceReply
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import upgrade
from tests.kit.handbook import AROUND_S, BUDGET_MS, WARM_UP_S, Probes, allowed_p99_ms, fill, grounded, p99_ms
from tests.kit.load_kit import ENV, POOL, Load, check_promise
from tests.kit.own_postgres import OwnPostgres
from tests.kit.pipeline import Pipeline

pytestmark = [pytest.mark.broker, pytest.mark.model, pytest.mark.alone]

_ANSWER_TIMEOUT_S = 60.0
_WHY = {RetrievalReason.LATE, RetrievalReason.UNAVAILABLE, RetrievalReason.BUSY}

Say = Callable[[str], None]


@pytest.fixture
def postgres_of_its_own(tmp_path: Path) -> Iterator[OwnPostgres]:
    with OwnPostgres(tmp_path / "postgres") as server:
        upgrade(Settings(postgres_owner_dsn=server.server.owner_dsn))
        yield server


@pytest.mark.parametrize("fault", ["gone", "hung"])
@pytest.mark.parametrize("outage_s", [5.0, pytest.param(20.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_requests_go_on_without_their_documents_and_say_so(
    broker: str,
    postgres_of_its_own: OwnPostgres,
    unique: str,
    tmp_path: Path,
    seed: int,
    say: Say,
    fault: str,
    outage_s: float,
) -> None:
    say(f"seed {seed}, Postgres {fault} for {outage_s:g} s")
    env = {**ENV, "POSTGRES_DSN": postgres_of_its_own.server.dispatcher_dsn, "RETRIEVAL_BUDGET_MS": str(BUDGET_MS)}
    with Pipeline(broker, tmp_path / "pipeline", unique, tenants=("a", "b"), env=env) as pipeline:
        for tenant in pipeline.tenants:
            fill(postgres_of_its_own.server.operator_dsn, tenant)
        pipeline.start(dispatchers=1, consumers=POOL.consumers)
        replies = pipeline.replies()
        probes = Probes(pipeline, "a", replies)
        probes.wait_found("passages")
        load = Load(pipeline, seed)
        seconds = WARM_UP_S + AROUND_S + outage_s + AROUND_S
        planned = load.plan([load.offered(tenant, 0.15) for tenant in ("a", "b")], seconds)
        with LoadGenerator(pipeline.settings, list(pipeline.tenants)) as generator:
            generator.start(grounded(pipeline, planned))
            sleep(WARM_UP_S + AROUND_S)  # the load before the fault; nothing is waited for
            asked_at_ms = now_ms()
            postgres_of_its_own.begin(fault)
            begun_at_ms = now_ms()
            sleep(outage_s)  # the fault itself
            # Who comes with less than its budget left may see the end of it.
            ended_at_ms = now_ms() - BUDGET_MS
            postgres_of_its_own.end()
            generator.wait_published(seconds + 60)
            generator.wait_answered(_ANSWER_TIMEOUT_S)
            observed = generator.observed()
        probes.wait_found("passages after the outage")
        found = replies.wait([one.request_id for one in observed])
        check_promise(pipeline, observed, probes.request_ids)
    assert {one.outcome for one in observed} == {Outcome.OK}
    during = submitted_within(observed, (begun_at_ms, ended_at_ms))
    warm_at_ms = generator.started_at_ms + round(WARM_UP_S * 1_000)
    before = submitted_within(observed, (warm_at_ms, asked_at_ms))
    assert len(during) > outage_s
    # Or all that follows would be shown of nothing. A slow machine keeps the budget less often.
    with_passages = sum(bool(found[one.request_id].passages) for one in before)
    assert with_passages > 0.3 * len(before)
    _check_what_is_said([found[one.request_id] for one in observed])
    without = [one for one in during if not found[one.request_id].passages]
    around = [one for one in observed if one.submitted_at_ms >= warm_at_ms and one not in during]
    reasons = Counter((use.reason if (use := found[one.request_id].retrieval_use) else "") for one in during)
    say(
        f"{len(without)} of {len(during)} requests during the outage without passages {dict(reasons)}, before "
        f"{len(before) - with_passages} of {len(before)}; all {len(observed)} answered; "
        f"p99 {p99_ms(during)} ms, before {p99_ms(before)} ms, before and after {p99_ms(around)} ms"
    )
    assert len(without) == len(during)
    assert p99_ms(during) <= allowed_p99_ms(around)


def _check_what_is_said(replies: list[InferenceReply]) -> None:
    for reply in replies:
        assert reply.retrieval_use is not None
        if reply.passages:
            assert Degradation.NO_RETRIEVAL not in reply.degradations
        else:
            assert Degradation.NO_RETRIEVAL in reply.degradations
            assert reply.retrieval_use.reason in _WHY
