"""What an arriving record is: dedicated pools, work that was handed back, and what cannot be read."""

from dataclasses import replace
from typing import Any

import pytest

from fairlane import headers, names
from fairlane.codec import DecodeProblem
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule
from fairlane.names import GATEWAY_REPLIES, JOBS_REPLIES
from fairlane.outcomes import Code, Decision, Degradation, Outcome
from fairlane.records import (
    InferenceRequest,
    Parameters,
    Passage,
    Retrieval,
    SourceCoordinate,
    TenantGroup,
    TenantSpec,
    WorkItem,
)
from fairlane.schema_files import default_codec
from stream_processors.dispatcher.intake.classifier import Verdict
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import QueuedRequest
from tests.kit.dispatcher_bench import MODEL, NOW_MS, SECRET, Bench, encoded, request
from tests.kit.intake_records import RETURNED, work_item

OWN_POOL = "acme-pool"
SERVED_BY_BOTH = replace(MODEL, dedicated_pools=(OWN_POOL,))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.assign("requests.other", "backfill.acme", RETURNED)
    return bench


def refused(bench: Bench, verdict: Verdict) -> tuple[str, Code]:
    """Of an answer at once: the topic of the reply and the code, which the audit says too."""
    assert isinstance(verdict, tuple)
    reply, audit = bench.decoded_all(verdict)
    assert (reply.outcome, audit.decision) == (Outcome.REJECTED, Decision.REFUSED)
    assert reply.code == audit.code
    return verdict[0].topic, reply.code


# Which pool


def test_a_request_goes_to_the_pool_of_its_model(bench: Bench) -> None:
    assert bench.queued(request()).pool == "pool"


def test_a_tenant_with_a_pool_goes_there(bench: Bench) -> None:
    bench.register([TenantSpec("acme", pool=OWN_POOL), TenantSpec("other")], [SERVED_BY_BOTH])
    assert bench.queued(request()).pool == OWN_POOL
    assert bench.queued(request(), "backfill.acme").pool == OWN_POOL
    assert bench.queued(request(), "requests.other").pool == "pool"


def test_a_model_may_live_on_the_tenants_pool_alone(bench: Bench) -> None:
    bench.register([TenantSpec("acme", pool=OWN_POOL)], [replace(MODEL, pool=OWN_POOL)])
    assert bench.queued(request()).pool == OWN_POOL


def test_a_tenant_with_a_pool_goes_nowhere_else(bench: Bench) -> None:
    bench.register([TenantSpec("acme", pool=OWN_POOL)], [MODEL])
    assert refused(bench, bench.take_in(request())) == ("replies.acme", Code.UNKNOWN_MODEL)


def test_nobody_else_goes_to_a_tenants_pool(bench: Bench) -> None:
    """Not even for a model that is served there alone."""
    bench.register([TenantSpec("acme", pool=OWN_POOL), TenantSpec("other")], [replace(MODEL, pool=OWN_POOL)])
    assert refused(bench, bench.take_in(request(), "requests.other")) == ("replies.other", Code.FORBIDDEN)


def test_a_pool_that_is_given_back_is_everybodys(bench: Bench) -> None:
    model = replace(MODEL, pool=OWN_POOL)
    bench.register([TenantSpec("acme", pool=OWN_POOL), TenantSpec("other")], [model])
    bench.register([TenantSpec("acme"), TenantSpec("other")], [model])
    assert bench.queued(request(), "requests.other").pool == OWN_POOL


# What a request becomes


def test_a_queued_request_knows_its_cost_and_its_time(bench: Bench) -> None:
    queued = bench.queued(request(timeout_ms=700), submitted_at_ms=NOW_MS - 50)
    assert (queued.cost_tokens, queued.prompt_tokens) == (5 + 2 * 4, 5)
    assert (queued.input_bytes, queued.size_bytes) == (len(SECRET), len(b"key" + encoded(timeout_ms=700)))
    assert (queued.submitted_at_ms, queued.deadline_at_ms) == (NOW_MS - 50, NOW_MS + 650)
    assert not queued.is_backfill


@pytest.mark.parametrize(("priority", "seconds"), [("high", 30), ("normal", 60), ("low", 120)])
def test_default_deadlines_by_class(bench: Bench, priority: str, seconds: int) -> None:
    assert bench.queued(request(priority=priority)).deadline_at_ms == NOW_MS + seconds * 1_000
    backfill = bench.queued(request(priority=priority), "backfill.acme")
    assert (backfill.deadline_at_ms, backfill.is_backfill) == (NOW_MS + 86_400_000, True)


def test_a_group_is_one_of_the_tenants_own(bench: Bench) -> None:
    bench.register([TenantSpec("acme", groups=(TenantGroup("search"),))])
    assert bench.queued(request(group="search")).group == "search"
    assert bench.queued(request()).group == ""
    assert refused(bench, bench.take_in(request(group="ads")))[1] == Code.INVALID


def test_a_request_carries_its_tenants_bounds(bench: Bench) -> None:
    bench.register([TenantSpec("acme", max_prompt_tokens=900, max_completion_tokens=3)])
    queued = bench.queued(request())
    assert queued.max_prompt_tokens == 900
    assert (queued.request, queued.cost_tokens) == (request(parameters=Parameters(3)), 5 + 2 * 3)
    assert bench.queued(request(parameters=Parameters(2))).request.parameters.max_tokens == 2
    assert bench.queued(request(parameters=Parameters())).request.parameters.max_tokens == 3
    assert bench.queued(work_item(request=request(parameters=Parameters(3))), RETURNED).max_prompt_tokens == 900


def test_another_version_of_its_model_does_not_give_a_tenant_more(bench: Bench) -> None:
    bounded = TenantSpec("acme", max_completion_tokens=700)
    bench.register([bounded])
    queued = bench.queued(request(parameters=Parameters()))
    assert queued.request.parameters.max_tokens == MODEL.max_output_tokens
    bench.register([replace(bounded, max_completion_tokens=300)], [replace(MODEL, version="2")])
    now = bench.dispatcher.registry.as_of_now(queued, NOW_MS)
    assert isinstance(now, QueuedRequest)
    assert (now.model.version, now.request.parameters.max_tokens) == ("2", 300)


def test_a_refused_replay_says_what_it_replays(bench: Bench) -> None:
    first = request(9).request_id
    verdict = bench.take_in(request(replay_of=first, group="ads"))
    assert isinstance(verdict, tuple)
    reply, audit = bench.decoded_all(verdict)
    assert (reply.replay_of, audit.inputs) == (first, {"field": "group", "replay_of": first})
    verdict = bench.take_in(request(replay_of="text that got into the wrong field"))
    assert isinstance(verdict, tuple)
    reply, audit = bench.decoded_all(verdict)
    assert (reply.field, reply.replay_of, audit.inputs) == ("replay_of", None, {"field": "replay_of"})


# Work that was handed back


def test_returned_work_comes_back_as_what_it_was(bench: Bench) -> None:
    queued = bench.queued(work_item(), RETURNED)
    assert queued.request == request()
    assert (queued.source, queued.claim.partition.topic) == (SourceCoordinate("requests.acme", 0, 41), RETURNED)
    assert (queued.tenant, queued.pool, queued.reply_topic, queued.handed_back) == ("acme", "pool", "replies.acme", 1)
    assert (queued.submitted_at_ms, queued.admitted_at_ms) == (NOW_MS - 1_000, NOW_MS - 900)
    assert (queued.deadline_at_ms, queued.cost_tokens, queued.prompt_tokens) == (NOW_MS + 5_000, 13, 5)
    assert queued.degradations == ()


def test_returned_work_comes_with_what_it_had(bench: Bench) -> None:
    passages = tuple(Passage(str(number), "text", 1.0) for number in range(4))
    item = work_item(
        request=request(retrieval=Retrieval("docs", 8)),
        passages=passages,
        degradations=(Degradation.CAPPED_MAX_TOKENS,),
    )
    queued = bench.queued(item, RETURNED)
    assert (queued.request, queued.passages, queued.degradations) == (item.request, passages, item.degradations)


def test_returned_backfill_is_backfill(bench: Bench) -> None:
    item = work_item(source=SourceCoordinate("backfill.acme", 0, 3))
    assert bench.queued(item, RETURNED).is_backfill


def dead_lettered(bench: Bench, verdict: Verdict, value: bytes) -> str:
    """The reason, after what is true of every dead letter of handed back work was checked."""
    assert isinstance(verdict, tuple)
    letter, audit = verdict
    assert (letter.topic, letter.value) == (names.DEAD_LETTER_REQUESTS, value)
    (event,) = bench.decoded_all([audit])
    assert (event.decision, event.tenant, event.request_id) == (Decision.DEAD_LETTERED, "", "")
    assert SECRET not in str(event) + str(letter.headers)
    return str(event.message)


LIES: dict[str, dict[str, Any]] = {
    "tenant: not that of its source": {"tenant": "other"},
    "source: no tenant's request topic": {"source": SourceCoordinate("replies.acme", 0, 1)},
    "source: no place in a log": {"source": SourceCoordinate("requests.acme", 0, -1)},
    "request.tenant: not that of its source": {"request": request(tenant="other")},
    "pool: not that of its topic": {"pool": "not-here"},
    "pool: not that": {"pool": "Bad Pool!"},
    "priority_class: not a class": {"request": request(priority="urgent"), "priority_class": "urgent"},
    "priority_class: not a class, or": {"request": request(priority="high")},
    "reply_topic: not its tenant's": {"reply_topic": "replies.other"},
    "reply_topic": {"reply_topic": "priority.pool.high"},
    "cost_tokens: negative": {"cost_tokens": -500, "prompt_tokens": 5},
    "cost_tokens": {"prompt_tokens": -1},
    "handed_back: less than 1": {"handed_back": 0},
}


@pytest.mark.parametrize(("reason", "lie"), LIES.items(), ids=str)
def test_returned_work_that_no_dispatcher_sent_is_dead_lettered(bench: Bench, reason: str, lie: dict[str, Any]) -> None:
    """And counted as nobody's: what it says of itself names no metric."""
    bench.register([TenantSpec("acme"), TenantSpec("other")])
    value = default_codec().encode(work_item(**lie))
    bench.classifier.counts = TenantCounters()
    message = dead_lettered(bench, bench.take_in(value, RETURNED), value)
    assert f"WorkItem.{reason}" in message
    expected = TenantCounters()
    expected.decided("", Decision.DEAD_LETTERED, DecodeProblem.INVALID_BODY)
    assert bench.classifier.counts == expected


def test_returned_work_answers_to_its_tenants_services(bench: Bench) -> None:
    assert bench.queued(work_item(reply_topic="replies.acme.search"), RETURNED).reply_topic == "replies.acme.search"


@pytest.mark.parametrize("topic", [GATEWAY_REPLIES, JOBS_REPLIES])
def test_returned_work_answers_to_the_shared_reply_topics(bench: Bench, topic: str) -> None:
    assert bench.queued(work_item(reply_topic=topic), RETURNED).reply_topic == topic


# Bytes that are spliced into work as they are


def test_bytes_behind_a_request_are_never_spliced_into_work() -> None:
    """A body goes on as it came: what stands behind it would be read as the fields that follow it in the work. Here
    they are good fields of another tenant's work, which the dispatcher's own bytes would follow unread."""
    codec, value = default_codec(), encoded()
    body = codec.body_if_current(InferenceRequest, value)
    assert body is not None
    forged = codec.encode(work_item(tenant="other", reply_topic="replies.other", cost_tokens=1))
    head, body_of_forged, rest = forged.partition(body)
    assert (len(head), body_of_forged) == (5, body), "a frame, then the request as it stands in its own record"
    for extra in (rest, b"\x00", b"\x00" * 64, SECRET.encode()):
        bench = Bench()
        (settlement,) = bench.run(value + extra)
        assert [output.topic for output in settlement.outputs] == [names.DEAD_LETTER_REQUESTS, names.LEDGER_AUDIT]
        (event,) = bench.decoded_all(settlement.outputs[1:])
        assert event.code == DecodeProblem.TRAILING_BYTES
    (good,) = Bench().run(value)
    assert codec.decode_as(WorkItem, good.outputs[0].value).tenant == "acme"


# What came too late


def test_returned_work_whose_model_was_withdrawn_is_refused(bench: Bench) -> None:
    """It was admitted, so it is answered: with the place where it stood first."""
    bench.register([TenantSpec("acme")], [])
    verdict = bench.take_in(work_item(), RETURNED)
    assert refused(bench, verdict) == ("replies.acme", Code.UNKNOWN_MODEL)
    assert isinstance(verdict, tuple)
    reply, audit = bench.decoded_all(verdict)
    assert reply.source == audit.source == SourceCoordinate("requests.acme", 0, 41)
    assert reply.timings.submitted_at_ms == NOW_MS - 1_000


def test_returned_work_of_a_tenant_that_was_withdrawn_is_refused(bench: Bench) -> None:
    """It was admitted, so it is answered."""
    bench.register([TenantSpec("other")])
    assert refused(bench, bench.take_in(work_item(), RETURNED)) == ("replies.acme", Code.FORBIDDEN)


@pytest.mark.parametrize("value", [b"", b"\x00\x00\x00\x00\x63nothing", encoded()])
def test_unreadable_returned_work_is_dead_lettered(bench: Bench, value: bytes) -> None:
    """Bytes that are no record, and a record that is no work."""
    verdict = bench.take_in(value, RETURNED)
    assert isinstance(verdict, tuple)
    letter, audit = verdict
    assert (letter.topic, letter.value) == (names.DEAD_LETTER_REQUESTS, value)
    assert dict(letter.headers)[headers.DLT_ORIGINAL_TOPIC] == RETURNED.encode()
    assert headers.TENANT not in dict(letter.headers), "nobody knows whose it is"
    (event,) = bench.decoded_all([audit])
    assert (event.decision, event.tenant) == (Decision.DEAD_LETTERED, "")
    assert SECRET not in str(event) + str(letter.headers)


def test_no_tenant_has_the_name_of_nobody() -> None:
    assert not names.is_name("")


# Guardrails

BLOCKS = GuardrailPolicy(input=(GuardrailRule("secrets", "block", "closed"),))
ALL_OFF = GuardrailPolicy(output=(GuardrailRule("pii", "off", "open"),))


def test_the_policy_of_guardrails_is_that_of_the_admission(bench: Bench) -> None:
    bench.register([TenantSpec("acme", guardrails=BLOCKS), TenantSpec("other")], [MODEL])
    queued = bench.queued(request())
    assert queued.guardrails == BLOCKS
    assert bench.queued(request(), "requests.other").guardrails is None
    bench.register([TenantSpec("acme", guardrails=ALL_OFF), TenantSpec("other")], [MODEL])
    assert queued.guardrails == BLOCKS
    assert bench.queued(request()).guardrails is None, "nothing is checked"


def test_work_that_was_handed_back_keeps_its_policy(bench: Bench) -> None:
    bench.register([TenantSpec("acme"), TenantSpec("other")], [MODEL])
    assert bench.queued(work_item(guardrails=BLOCKS), RETURNED).guardrails == BLOCKS
    bench.register([TenantSpec("acme", guardrails=BLOCKS), TenantSpec("other")], [MODEL])
    assert bench.queued(work_item(), RETURNED).guardrails == BLOCKS, "an older consumer may have dropped it"
