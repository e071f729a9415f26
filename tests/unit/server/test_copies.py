"""A copy keeps what the original ran with, and is nothing of its tenant's otherwise."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from fairlane.evaluation_records import EvaluationMark
from fairlane.guardrail_records import GuardrailPolicy
from fairlane.names import EVALUATION_REPLIES, EVALUATION_TENANT, is_name, is_request_id, may_carry_replies_of
from fairlane.records import (
    BudgetNotice,
    InferenceRequest,
    Message,
    Parameters,
    Passage,
    RequestInput,
    Retrieval,
    SourceCoordinate,
    WorkItem,
)
from fairlane_server.evaluation.copies import copy_id, copy_of

ITEM = WorkItem(
    request=InferenceRequest(
        *("7d2f0c52-6d0f-4c37-9a51-2f3b6c1f0a55", "words", "generate", RequestInput(prompt="a secret")),
        parameters=Parameters(40, 0.7, seed=11, stream=True),
        priority="high",
        timeout_ms=500,
        tenant="acme",
        reply_to="replies.acme.search",
        retrieval=Retrieval("handbook"),
        conversation_id="talk-1",
        metadata={"ticket": "17"},
        group="search",
        cache="exact",
        requested_by="key:1",
    ),
    tenant="acme",
    pool="generate",
    model_version="1",
    priority_class="high",
    cost_tokens=90,
    submitted_at_ms=1,
    admitted_at_ms=2,
    dispatched_at_ms=3,
    deadline_at_ms=501,
    reply_topic="replies.acme.search",
    dispatcher_id="dispatcher-1",
    source=SourceCoordinate("requests.acme", 0, 7),
    degradations=("fewer_passages",),
    passages=(Passage("p1", "a passage", 0.5),),
    prompt_tokens=10,
    handed_back=1,
    max_prompt_tokens=900,
    history=(Message("user", "hello"),),
    cache_answer=True,
    budget=BudgetNotice("soft", "tenant", "day", "EUR", 1, 1, 0, 2),
    guardrails=GuardrailPolicy(),
    arm="champion",
    unserved=1,
)
MARK = EvaluationMark("shadow", "words-2-1", "candidate", "acme", ITEM.request.request_id)
COPY = copy_of(ITEM, MARK, "2", 1_000, 600_000)
RUNS_WITH = {"passages", "history", "guardrails", "max_prompt_tokens", "cost_tokens", "prompt_tokens", "degradations"}
"""Of a work item, what determines the answer or its cost, besides the request's own input and parameters."""


def test_a_copy_runs_with_what_the_original_ran_with() -> None:
    for name in (*RUNS_WITH, "source", "pool", "retrieval_use", "history_use"):
        assert getattr(COPY, name) == getattr(ITEM, name), name
    asked, original = COPY.request, ITEM.request
    assert (asked.model, asked.task, asked.input) == (original.model, original.task, original.input)
    assert asked.parameters == replace(original.parameters, stream=False)
    assert asked.conversation_id == original.conversation_id, "an engine renders a turn otherwise than a prompt"


def test_a_copy_is_nothing_of_its_tenant_but_the_mark() -> None:
    assert COPY.evaluation == MARK
    assert (COPY.tenant, COPY.reply_topic, COPY.priority_class) == (EVALUATION_TENANT, EVALUATION_REPLIES, "low")
    assert (COPY.model_version, COPY.arm, COPY.handed_back, COPY.unserved) == ("2", "version", 0, 0)
    assert (COPY.submitted_at_ms, COPY.deadline_at_ms) == (1_000, 601_000)
    assert (COPY.cache_answer, COPY.budget) == (False, None)
    asked = COPY.request
    left_out = ("tenant", "reply_to", "timeout_ms", "group", "cache", "requested_by")
    assert [getattr(asked, name) for name in left_out] == [None] * len(left_out)
    assert asked.metadata == {}
    assert is_request_id(asked.request_id)
    assert asked.request_id != ITEM.request.request_id
    assert {entry.name for entry in fields(WorkItem)} >= RUNS_WITH


def test_no_tenant_can_have_the_name_of_evaluation_or_name_its_replies() -> None:
    assert not is_name(EVALUATION_TENANT)
    assert not may_carry_replies_of(EVALUATION_REPLIES, "acme")


@given(st.lists(st.tuples(*[st.text(alphabet="ab-/", max_size=4)] * 4), unique=True, max_size=20))
def test_ids_are_the_same_for_the_same_copy_and_differ_for_others(keys: list[tuple[str, str, str, str]]) -> None:
    ids = [copy_id(*key) for key in keys]
    assert len(set(ids)) == len(keys)
    assert ids == [copy_id(*key) for key in keys]
    assert all(map(is_request_id, ids))
