"""The demo's findings and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.checks import PromiseCheck
from deploy.demo.report import DemoReply, as_json, rows
from deploy.demo.workload import TENANTS, DemoRequest, build_workload
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, Output, Timings, TokenUsage

QUESTIONS = Path(__file__).parents[3] / "deploy" / "demo" / "questions.yaml"


def _ask(fields: Mapping[str, Any] | None = None) -> DemoRequest:
    return DemoRequest("generate", fields or {}, lambda reply: reply.output is not None, lambda _reply: "shown", "acme")


def _reply(**changes: Any) -> InferenceReply:
    timings = Timings(
        submitted_at_ms=1_000, received_at_ms=1_010, engine_started_at_ms=1_015, engine_finished_at_ms=1_115
    )
    plain: dict[str, Any] = {"request_id": "r", "tenant": "acme", "outcome": Outcome.OK, "timings": timings}
    return InferenceReply(**(plain | changes))


def test_stages_follow_one_another() -> None:
    answered = DemoReply(_ask(), _reply(), received_at_ms=1_120)

    assert answered.stages_ms() == {"queue": 10, "batch_wait": 5, "engine": 100, "commit": 5}


def test_a_failed_reply_is_not_right() -> None:
    assert not DemoReply(_ask(), _reply(outcome=Outcome.FAILED, output=Output(text="x")), 1_120).right
    assert DemoReply(_ask(), _reply(output=Output(text="x")), 1_120).right


def test_rows_add_up_per_tenant_and_task() -> None:
    reply = _reply(output=Output(text="x"), usage=TokenUsage(3, 4), batch_size=2)
    (row,) = rows([DemoReply(_ask(), reply, 1_120), DemoReply(_ask(), _reply(), 1_130)])

    assert (row.requests, row.right, row.prompt_tokens, row.completion_tokens, row.largest_batch) == (2, 1, 3, 4, 2)


@pytest.mark.parametrize("name", ["unanswered", "answered_twice", "without_row", "rows_that_differ"])
def test_any_finding_fails_the_demo(name: str) -> None:
    findings = PromiseCheck(1, **{name: ["r"]})

    assert not findings.ok
    assert as_json([], [], findings, 1.0)["ok"] is False
    assert PromiseCheck(1).ok


def test_the_workload_reaches_every_tenant_with_every_task() -> None:
    asks = build_workload(QUESTIONS)

    assert len(asks) >= 60
    assert {(ask.tenant, ask.task) for ask in asks} == {
        (tenant, task) for tenant in TENANTS for task in ("generate", "embed", "rank", "classify")
    }
    assert {ask.fields["priority"] for ask in asks} == {"high", "normal", "low"}
