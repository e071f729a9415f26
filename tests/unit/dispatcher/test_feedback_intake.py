"""Feedback on tenants' topics: passed on with its tenant and the broker's time, or refused with a reason."""

from dataclasses import replace

import pytest

from fairlane import names
from fairlane.outcomes import Decision
from fairlane.ownership import PartitionId
from fairlane.records import Feedback
from fairlane.schema_files import default_codec
from tests.kit.cached_replies import after, id_of
from tests.kit.dispatcher_bench import NOW_MS, SECRET, Bench, encoded

GIVEN = Feedback(id_of(1), thumb="down", correction=SECRET, tags=("flagged",), comment=SECRET, given_by="user:7")


def given(feedback: Feedback) -> bytes:
    return default_codec().encode(feedback)


def passed_on(bench: Bench) -> list[Feedback]:
    return bench.decoded_all(out for out in bench.transactions.written if out.topic == names.LEDGER_FEEDBACK)


def test_valid_feedback_is_passed_on_with_its_tenant_and_the_time_of_the_broker() -> None:
    bench = Bench()
    after(bench, given(replace(GIVEN, given_at_ms=5)))
    assert passed_on(bench) == [replace(GIVEN, tenant="acme", given_at_ms=NOW_MS)]
    (record,) = (out for out in bench.transactions.written if out.topic == names.LEDGER_FEEDBACK)
    assert record.key == b"acme"
    (settlement,) = bench.transactions.settlements
    assert (settlement.claim.partition.topic, settlement.outputs) == ("requests.acme", (record,))
    assert not bench.decoded("replies.acme")
    assert not bench.audit()


@pytest.mark.parametrize(
    ("feedback", "field"),
    [
        (replace(GIVEN, tenant="globex"), "tenant"),
        (replace(GIVEN, thumb=SECRET), "thumb"),
        (Feedback(id_of(1)), "feedback"),
        (Feedback("no-uuid", thumb="up"), "request_id"),
    ],
)
def test_invalid_feedback_is_refused_in_the_audit_without_a_reply_or_a_text(feedback: Feedback, field: str) -> None:
    bench = Bench()
    after(bench, given(feedback))
    assert passed_on(bench) == []
    (event,) = bench.audit()
    assert (event.tenant, event.decision, event.inputs["field"]) == ("acme", Decision.FEEDBACK_REFUSED, field)
    assert (event.message or "").startswith("feedback: ")
    assert SECRET not in str(event)
    assert not bench.decoded("replies.acme")


def test_valid_feedback_costs_nothing_of_the_budget_of_invalid_records() -> None:
    bench = Bench(max_invalid_records_per_s=1)
    for offset in range(10, 30):
        after(bench, given(GIVEN), offset=offset)
    assert not bench.dispatcher.intake.held()
    assert len(passed_on(bench)) == 20
    after(bench, encoded(2), offset=200)
    assert bench.audit(), "the request behind it is decided"


def test_a_partition_with_too_much_feedback_is_held_until_its_debt_is_paid_also_when_it_sends_alone() -> None:
    bench = Bench(max_feedback_per_s=10)
    for offset in range(10, 30):
        after(bench, given(GIVEN), offset=offset)
    assert len(passed_on(bench)) == 20, "what was read is passed on"
    assert bench.dispatcher.intake.held() == {PartitionId("requests.acme", 0)}
    bench.now_ms += 1_499
    assert bench.dispatcher.intake.held()
    bench.now_ms += 2
    assert not bench.dispatcher.intake.held()
    after(bench, encoded(2), offset=200)
    assert bench.audit(), "the request behind it is decided"
