"""Report of the demo: a table per tenant and task, or one JSON object."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.demo.checks import PromiseCheck
from deploy.demo.documents import Compared
from deploy.demo.workload import DemoRequest, text_of
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply

STAGES = ("queue", "batch_wait", "engine", "commit")
_SAMPLE_CHARS = 24


@dataclass(frozen=True, slots=True)
class DemoReply:
    """A request and its reply; ``received_at_ms``: at the client, since the epoch."""

    request: DemoRequest
    reply: InferenceReply
    received_at_ms: int

    @property
    def right(self) -> bool:
        return self.reply.outcome == Outcome.OK and self.request.is_right(self.reply)

    def stages_ms(self) -> dict[str, int]:
        """queue: from the broker to a consumer; commit: until the client has the reply."""
        timings = self.reply.timings
        marks = (
            timings.submitted_at_ms,
            timings.received_at_ms,
            timings.engine_started_at_ms,
            timings.engine_finished_at_ms,
            self.received_at_ms,
        )
        return {
            stage: max(0, end - start)
            for stage, start, end in zip(STAGES, marks, marks[1:], strict=False)
            if start is not None and end is not None
        }


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """One tenant and task; stages as (p50, p95) in milliseconds."""

    tenant: str
    task: str
    requests: int
    right: int
    sample: str
    prompt_tokens: int
    completion_tokens: int
    largest_batch: int
    stages_ms: dict[str, tuple[float, float]]


def rows(answered: Sequence[DemoReply]) -> list[TaskFigures]:
    """The table's rows, by tenant and task."""
    groups: dict[tuple[str, str], list[DemoReply]] = {}
    for one in answered:
        groups.setdefault((one.request.tenant, one.request.task), []).append(one)
    return [
        TaskFigures(
            tenant=tenant,
            task=task,
            requests=len(group),
            right=sum(one.right for one in group),
            sample=group[0].request.show(group[0].reply)[:_SAMPLE_CHARS],
            prompt_tokens=sum(one.reply.usage.prompt_tokens for one in group),
            completion_tokens=sum(one.reply.usage.completion_tokens for one in group),
            largest_batch=max(one.reply.batch_size for one in group),
            stages_ms={stage: _p50_p95([one.stages_ms()[stage] for one in group]) for stage in STAGES},
        )
        for (tenant, task), group in sorted(groups.items())
    ]


def _p50_p95(values: Sequence[int]) -> tuple[float, float]:
    if len(values) == 1:
        return float(values[0]), float(values[0])
    cuts = quantiles(values, n=100, method="inclusive")
    return round(cuts[49], 1), round(cuts[94], 1)


def as_json(
    table: Sequence[TaskFigures], compared: Sequence[Compared], findings: PromiseCheck, seconds: float
) -> dict[str, Any]:
    """The whole result as plain values."""
    return {
        "ok": findings.ok,
        "seconds": round(seconds, 1),
        "requests": sum(row.requests for row in table),
        "right": sum(row.right for row in table),
        "rows": [asdict(row) for row in table],
        "documents": [
            {
                "question": one.question.question,
                "answer": text_of(one.grounded),
                "right": one.question.is_answered_by(one.grounded),
                "passages": [passage.passage_id for passage in one.grounded.passages],
                "answer_without": text_of(one.ungrounded),
            }
            for one in compared
        ],
        "findings": asdict(findings),
    }


def show(
    console: Console, table: Sequence[TaskFigures], compared: Sequence[Compared], findings: PromiseCheck, seconds: float
) -> None:
    """The same for a person."""
    console.print(_answers(table), _stages(table), _documents(compared))
    right, asked = sum(row.right for row in table), sum(row.requests for row in table)
    console.print(f"{asked} requests in {seconds:.1f} s, {right} answered as expected.")
    for one in compared:
        if not one.has_its_source:
            use = one.grounded.retrieval_use
            why = "" if use is None or use.reason is None else f" ({use.reason} after {use.took_ms} ms)"
            console.print(f"[red]not answered from {one.question.source}[/red]{why}: {one.question.question}")
    if findings.ok:
        console.print("[green]Every request has exactly one committed reply and one row in Postgres.[/green]")
        return
    for name in ("unanswered", "answered_twice", "without_row", "rows_that_differ"):
        ids = getattr(findings, name)
        if ids:
            console.print(f"[red]{name.replace('_', ' ')}: {len(ids)}[/red], for instance {ids[0]}")


def _answers(table: Sequence[TaskFigures]) -> Table:
    shown = Table("tenant", "task", "n", "right", "an answer", "tokens", "batch", title="Answers", title_justify="left")
    for row in table:
        tokens = f"{row.prompt_tokens}+{row.completion_tokens}"
        numbers = (str(row.requests), str(row.right))
        shown.add_row(row.tenant, row.task, *numbers, row.sample, tokens, f"≤{row.largest_batch}")
    return shown


def _documents(compared: Sequence[Compared]) -> Table:
    shown = Table("question", "from documents", "without", title="Answers from acme's handbook", title_justify="left")
    for one in compared:
        passages = ", ".join(passage.passage_id for passage in one.grounded.passages)
        grounded = f"{escape(text_of(one.grounded))}\n[dim]{escape(passages)}[/dim]"
        shown.add_row(one.question.question, grounded, escape(text_of(one.ungrounded)))
    return shown


def _stages(table: Sequence[TaskFigures]) -> Table:
    shown = Table("tenant", "task", title="Stages, p50 / p95 in ms", title_justify="left")
    for stage in STAGES:
        shown.add_column(stage.replace("_", " "), justify="right")
    for row in table:
        spans = (row.stages_ms[stage] for stage in STAGES)
        shown.add_row(row.tenant, row.task, *(f"{p50:.0f} / {p95:.0f}" for p50, p95 in spans))
    return shown
