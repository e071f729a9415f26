"""The cost model learns what requests cost, and settles what was charged."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code, Outcome
from fairlane.records import ModelVersion, SourceCoordinate, UsageEvent
from stream_processors.dispatcher.scheduling.cost import Cost, CostModel, actual_cost, correction

CHAT = ModelVersion("chat", "1", "gpu", "causal-lm", ("generate",), "chat", 2_048, 512)
EMBED = ModelVersion("embed", "1", "cpu", "embedding", ("embed",), "embed", 256, 0)


def used(prompt: int, completion: int, outcome: str = Outcome.OK) -> UsageEvent:
    return UsageEvent(
        request_id="id",
        tenant="acme",
        pool="gpu",
        model="chat",
        model_version="1",
        priority_class="normal",
        outcome=outcome,
        code=Code.POISON if outcome == Outcome.FAILED else None,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=0,
        cost_tokens=1,
        engine_ms=1,
        occurred_at_ms=1,
        work=SourceCoordinate("priority.gpu.normal", 0, 1),
    )


def test_before_anything_was_learned() -> None:
    costs = CostModel()
    assert costs.estimate("acme", CHAT, 400, None) == Cost(100, 256, 256)
    assert costs.estimate("acme", CHAT, 400, 10) == Cost(100, 10, 10)
    assert costs.estimate("acme", CHAT, 400, 9_999) == Cost(100, 512, 256)
    assert costs.estimate("acme", CHAT, 0, 1) == Cost(1, 1, 1)
    assert costs.estimate("acme", EMBED, 400, 10) == Cost(100, 0, 0)
    assert costs.estimate("acme", CHAT, 400, 10).total == 120


def estimated(costs: CostModel, tenant: str = "acme", most: int | None = None, size: int = 400) -> tuple[int, int]:
    """Prompt and output tokens. What is seldom exceeded stays near where all answers are alike."""
    cost = costs.estimate(tenant, CHAT, size, most)
    assert cost.output_tokens <= cost.cautious_output_tokens <= 1.1 * cost.output_tokens + 1
    return cost.prompt_tokens, cost.output_tokens


def learn(costs: CostModel, usage: UsageEvent, *, tenant: str = "acme", size: int = 400, most: int = 512) -> None:
    costs.learn(tenant, "chat", size, most, usage)


def test_a_new_tenant_does_not_start_from_those_who_send_most() -> None:
    costs = CostModel()
    for _ in range(1_000):
        learn(costs, used(100, 512), tenant="flood")
    for _ in range(10):
        learn(costs, used(100, 51), tenant="quiet")
    for _ in range(32):
        learn(costs, used(100, 512), tenant="flood")
    assert costs.estimate("new", CHAT, 400, None).output_tokens < 0.7 * 512


def test_it_learns_tokens_per_byte_and_the_length_of_answers() -> None:
    costs = CostModel()
    for _ in range(100):
        learn(costs, used(prompt=250, completion=40))
    assert estimated(costs) == (250, 40)
    assert estimated(costs, most=10, size=4_000) == (2_500, 10), "nothing is known of short ones"


def test_a_new_tenant_starts_from_the_answers_of_the_others() -> None:
    costs = CostModel()
    for _ in range(100):
        learn(costs, used(prompt=250, completion=40))
    assert estimated(costs, "zenith") == (100, 40), "prompts are of this tenant alone"
    for _ in range(30):
        learn(costs, used(prompt=100, completion=400), tenant="zenith")
    assert costs.estimate("zenith", CHAT, 400, None).output_tokens > 350
    assert costs.estimate("acme", CHAT, 400, None).output_tokens == 40, "its own"


def test_answers_are_learned_as_a_part_of_what_was_allowed() -> None:
    """Who asks for the length he expects, and who asks for the longest that he can bear."""
    costs = CostModel()
    for exact in (20, 25, 30, 17) * 20:
        learn(costs, used(prompt=100, completion=exact), most=exact)
        learn(costs, used(prompt=100, completion=40), most=512)
    assert estimated(costs, most=18) == (100, 18)
    assert estimated(costs, most=31) == (100, 31)
    assert estimated(costs, most=512) == (100, 40)


def test_it_learns_the_mean_of_a_mixture_and_what_is_seldom_exceeded() -> None:
    random.seed(4)
    costs = CostModel(smoothing=0.02)
    for _ in range(2_000):
        size = random.randrange(100, 10_000)
        answer = random.choice((10, 20, 30, 40, 50, 60, 70, 80, 90, 100))
        learn(costs, used(prompt=size // 3, completion=answer), size=size)
    estimate = costs.estimate("acme", CHAT, 3_000, None)
    assert estimate.prompt_tokens == pytest.approx(1_000, rel=0.02)
    assert estimate.output_tokens == pytest.approx(55, rel=0.3)
    assert 75 <= estimate.cautious_output_tokens <= 115


def test_it_adapts_when_a_tenant_changes() -> None:
    costs = CostModel()
    for completion in [400] * 100 + [20] * 40:
        learn(costs, used(prompt=100, completion=completion))
    assert costs.estimate("acme", CHAT, 400, None).output_tokens < 30


def test_many_in_flight_do_not_make_it_overshoot() -> None:
    costs = CostModel()
    # All estimated before the first was done.
    for _ in range(1_000):
        learn(costs, used(prompt=300, completion=1))
    assert costs.estimate("acme", CHAT, 400, None).prompt_tokens == 300


@pytest.mark.parametrize("outcome", [Outcome.EXPIRED, Outcome.CANCELLED, Outcome.REJECTED, Outcome.FAILED])
def test_only_an_answer_teaches(outcome: Outcome) -> None:
    costs = CostModel()
    learn(costs, used(prompt=999, completion=999, outcome=outcome))
    assert len(costs) == 0


def test_where_no_tokens_were_counted_nothing_is_learned() -> None:
    costs = CostModel()
    learn(costs, used(prompt=0, completion=0))
    learn(costs, used(prompt=10, completion=1), size=0)
    assert len(costs) == 0


def test_it_forgets_the_pair_that_was_taught_longest_ago() -> None:
    costs = CostModel(max_entries=3)
    for tenant in ("a", "b", "c", "a", "d"):
        learn(costs, used(prompt=300, completion=7), tenant=tenant)
    assert len(costs) == 3
    assert costs.estimate("b", CHAT, 400, None).prompt_tokens == 100
    assert all(estimated(costs, tenant) == (300, 7) for tenant in "acd")


@pytest.mark.parametrize("wrong", [{"max_entries": 0}, {"smoothing": 0.0}, {"smoothing": 1.1}])
def test_a_model_that_cannot_learn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CostModel(**wrong)  # type: ignore[arg-type]  # one of them is an int


TOKENS = st.integers(0, 10**6)


@given(
    taught=st.lists(st.tuples(st.integers(-5, 10**7), st.integers(0, 10**6), TOKENS, TOKENS), max_size=30),
    input_bytes=st.integers(0, 10**7),
    max_tokens=st.none() | st.integers(1, 10**6),
)
def test_an_estimate_stays_in_bounds_whatever_was_taught(
    taught: list[tuple[int, int, int, int]], input_bytes: int, max_tokens: int | None
) -> None:
    costs = CostModel()
    for size, most, prompt, completion in taught:
        costs.learn("acme", "chat", size, most, used(prompt, completion))
    cost = costs.estimate("acme", CHAT, input_bytes, max_tokens)
    plain = max(1, input_bytes // 4)
    assert 1 <= cost.prompt_tokens <= 16 * plain
    most = min(max_tokens or 512, 512)
    assert 1 <= cost.output_tokens <= most
    assert min(cost.output_tokens, 256) <= cost.cautious_output_tokens <= most
    assert cost.total == cost.prompt_tokens + 2 * cost.output_tokens


def test_the_actual_cost() -> None:
    assert actual_cost(used(100, 20)) == 140


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (used(100, 20), 140 - 200),
        (used(100, 80), 260 - 200),
        (used(0, 0, Outcome.EXPIRED), -200),
        (used(30, 5, Outcome.CANCELLED), 40 - 200),
        (used(0, 0, Outcome.REJECTED), -200),
        (used(0, 0, Outcome.FAILED), 0),
        (used(300, 0, Outcome.FAILED), 100),
        (used(0, 0), 0),
    ],
)
def test_what_was_charged_is_settled(usage: UsageEvent, expected: int) -> None:
    assert correction(200, usage) == expected


@given(charged=TOKENS, prompt=TOKENS, completion=TOKENS, outcome=st.sampled_from(tuple(Outcome)))
def test_a_tenant_pays_what_was_spent_and_never_less_than_nothing(
    charged: int, prompt: int, completion: int, outcome: Outcome
) -> None:
    usage = used(prompt, completion, outcome)
    paid = charged + correction(charged, usage)
    assert paid >= actual_cost(usage) >= 0
    assert paid in {actual_cost(usage), charged}
