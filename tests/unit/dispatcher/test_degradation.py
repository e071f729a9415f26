"""The degradation ladder: it does not flap, and what it takes away is listed, allowed and leaves a valid request."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Degradation
from fairlane.records import (
    InferenceRequest,
    Message,
    ModelVersion,
    Parameters,
    Passage,
    RequestInput,
    Retrieval,
    TenantSpec,
)
from fairlane_server.models.catalog import catalog_of
from stream_processors.dispatcher.admission.degradation import (
    DEFAULT_LADDER,
    LADDER,
    Degraded,
    Ladder,
    LadderPolicy,
    Reduced,
    degrade,
    reduced_context,
)
from stream_processors.dispatcher.intake.validation import RequestLimits, ValidRequest, size_of_input, validate

TOP = len(LADDER)
SHORT_LADDER = LadderPolicy(up_at=(0.5, 0.6, 0.9), up_every_ms=100, down_after_ms=1_000)
LIMITS = RequestLimits(max_input_bytes=100_000, max_input_items=64, max_timeout_ms=86_400_000, max_output_tokens=128)
ID = str(UUID(int=1))


def model(
    name: str, *, context: int = 2_048, output: int = 512, tasks: tuple[str, ...] = ("generate",)
) -> ModelVersion:
    return ModelVersion(name, "1", "gpu", "causal-lm", tasks, name, context, output)


LARGE = model("large")
SMALL = model("small", context=1_024, output=256)


def chat(*roles_and_words: tuple[str, str], **changes: Any) -> InferenceRequest:
    messages = tuple(Message(role, word) for role, word in roles_and_words)
    return replace(InferenceRequest(ID, "large", "generate", RequestInput(messages=messages)), **changes)


def at(
    level: int,
    request: InferenceRequest,
    *,
    forbidden: tuple[str, ...] = (),
    smaller: ModelVersion | None = None,
    backfill: bool = False,
) -> Degraded:
    return degrade(request, level, forbidden, LARGE, smaller, backfill=backfill)


HELLO = chat(("user", "hello"), parameters=Parameters(max_tokens=16))
LOOKED_UP = replace(HELLO, retrieval=Retrieval("docs", top_k=5))


# --- the ladder


def levels(policy: LadderPolicy, signal: list[tuple[int, float]]) -> list[tuple[int, int]]:
    """(time, level) after each (milliseconds since the one before, pressure)."""
    ladder, now_ms, seen = Ladder(policy), 1_000_000, []
    for passed_ms, pressure in signal:
        now_ms += passed_ms
        seen.append((now_ms, ladder.level("gpu", "acme", pressure, now_ms)))
    return seen


def test_it_rises_a_step_at_a_time_and_falls_after_calm() -> None:
    rising = levels(SHORT_LADDER, [(50, 2.0)] * 8)
    assert [level for _, level in rising] == [1, 1, 2, 2, 3, 3, 3, 3]
    falling = levels(SHORT_LADDER, [(100, 2.0)] * 3 + [(500, 0.1)] * 8)
    assert [level for _, level in falling] == [1, 2, 3, 3, 3, 2, 2, 1, 1, 0, 0]


def test_it_stays_between_the_thresholds() -> None:
    # Level 1 is entered at 0.5 and calm below 0.35.
    seen = levels(SHORT_LADDER, [(100, 0.5), *[(100, 0.36)] * 50, *[(100, 0.59)] * 50])
    assert {level for _, level in seen} == {1}


def test_one_busy_moment_breaks_the_calm() -> None:
    seen = levels(SHORT_LADDER, [(100, 0.5), *([(900, 0.1), (50, 0.4)] * 20)])
    assert {level for _, level in seen} == {1}


def test_each_pair_has_its_own_level() -> None:
    ladder = Ladder(SHORT_LADDER)
    assert ladder.level("gpu", "acme", 1.0, 0) == 1
    assert ladder.level("gpu", "zenith", 0.0, 0) == 0
    assert ladder.level("cpu", "acme", 0.4, 0) == 0
    assert ladder.level("gpu", "acme", 0.4, 0) == 1
    assert len(ladder) == 1
    assert (ladder.present_level("gpu", "acme", 0), ladder.present_level("cpu", "acme", 0)) == (1, 0)


@pytest.mark.parametrize("pressure", [math.nan, -1.0, 0.0, 0.49])
def test_without_pressure_nothing_is_remembered(pressure: float) -> None:
    ladder = Ladder()
    assert ladder.level("gpu", "acme", pressure, 0) == 0
    assert len(ladder) == 0


def test_a_pressure_that_is_no_number_changes_nothing() -> None:
    seen = levels(SHORT_LADDER, [(100, math.inf), *[(1_000, math.nan)] * 5])
    assert {level for _, level in seen} == {1}


def test_a_request_feels_no_level_far_above_its_own_pressure() -> None:
    # The marks are 0.5, 0.6 and 0.9; a level is felt from 0.6 of its mark.
    ladder = Ladder(SHORT_LADDER)
    assert [ladder.felt(3, pressure) for pressure in (0.0, 0.29, 0.31, 0.35, 0.37, 0.53, 0.55, 9.0)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert [ladder.felt(level, 9.0) for level in range(4)] == [0, 1, 2, 3]
    assert ladder.felt(2, math.nan) == 2


def test_the_patient_do_not_feel_the_impatient() -> None:
    """Both of one tenant, in turn, for 10 s."""
    ladder, felt = Ladder(), []
    for now_ms in range(0, 10_000, 100):
        pressure = 0.95 if now_ms % 200 else 0.002
        felt.append((pressure, ladder.felt(ladder.level("gpu", "acme", pressure, now_ms), pressure)))
    assert {level for pressure, level in felt if pressure < 0.5} == {0}
    impatient = [level for pressure, level in felt if pressure > 0.5]
    assert (impatient[0], impatient[-1]) == (1, TOP)
    assert impatient == sorted(impatient), "and it does not flap"


@pytest.mark.parametrize("back_ms", [1_000, 3_600_000])
def test_a_clock_that_is_set_back_holds_no_level(back_ms: int) -> None:
    there = levels(SHORT_LADDER, [(100, 2.0)] * 3 + [(500, 0.1), (-back_ms, 0.1)] + [(500, 0.1)] * 8)
    assert [level for _, level in there[:3]] == [1, 2, 3]
    assert there[-1][1] == 0


def test_idle_pairs_are_forgotten() -> None:
    ladder = Ladder(SHORT_LADDER)
    for index in range(1_000):
        ladder.level("gpu", f"tenant-{index}", 9.0, index)
    assert len(ladder) == 1_000
    gone_ms = 999 + SHORT_LADDER.forget_after_ms
    assert ladder.level("gpu", "another", 0.0, gone_ms - 1) == 0
    assert len(ladder) == 1
    assert ladder.level("gpu", "tenant-999", 0.4, gone_ms) == 0
    assert len(ladder) == 0


def test_at_most_so_many_pairs_are_remembered() -> None:
    ladder = Ladder(replace(SHORT_LADDER, max_entries=10))
    for index in range(100):
        ladder.level("gpu", f"tenant-{index}", 9.0, 0)
        ladder.level("gpu", "tenant-0", 9.0, 0)
    assert len(ladder) == 10
    assert ladder.level("gpu", "tenant-0", 0.4, 1) == 1, "the one asked about longest ago goes first"


@pytest.mark.parametrize(
    "wrong",
    [
        {"up_at": ()},
        {"up_at": (0.0, 0.5)},
        {"up_at": (0.5, 0.4)},
        {"down_ratio": 1.0},
        {"down_ratio": 0.0},
        {"spared_ratio": 0.0},
        {"spared_ratio": 0.7},
        {"up_every_ms": 0},
        {"up_every_ms": 5_001},
        {"max_entries": 0},
    ],
)
def test_a_ladder_that_would_flap_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        replace(DEFAULT_LADDER, **wrong)


POLICIES = st.builds(
    lambda up_at, down_ratio, spared_part, up_every_ms, down_after_ms: LadderPolicy(
        tuple(sorted(up_at)), down_ratio, spared_part * down_ratio, up_every_ms, down_after_ms
    ),
    st.lists(st.floats(0.01, 2), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
    st.floats(0.1, 0.99),
    st.integers(1, 500),
    st.integers(500, 3_000),
)
STEPS_MS = st.one_of(st.integers(0, 40), st.integers(0, 1_000), st.integers(0, 20_000))
PRESSURES = st.one_of(st.floats(0, 2.5), st.sampled_from((0.0, math.inf)))
SIGNALS = st.lists(st.tuples(STEPS_MS, PRESSURES), min_size=2, max_size=120)


@given(policy=POLICIES, signal=SIGNALS)
def test_it_never_flaps(policy: LadderPolicy, signal: list[tuple[int, float]]) -> None:
    """Whatever the pressure does, rises and turns are bounded by the time that passes."""
    seen = levels(policy, signal)
    rises = [now for (_, before), (now, after) in pairwise([(0, 0), *seen]) if after > before]
    falls = [now for (_, before), (now, after) in pairwise(seen) if after < before]
    assert all(after <= before + 1 for (_, before), (_, after) in pairwise([(0, 0), *seen]))
    for first in range(len(rises)):
        for last in range(first, len(rises)):
            assert last - first <= (rises[last] - rises[first]) / policy.up_every_ms
    for fall in falls:
        assert all(not fall - policy.down_after_ms < rise < fall for rise in rises)
    turns = [fall for before, fall in pairwise([0, *falls]) if any(before < rise < fall for rise in rises)]
    assert len(turns) <= (seen[-1][0] - seen[0][0]) / policy.down_after_ms + 1


@given(policy=POLICIES, signal=st.lists(st.tuples(STEPS_MS, PRESSURES, PRESSURES), max_size=120))
def test_more_pressure_never_means_a_lower_level(policy: LadderPolicy, signal: list[tuple[int, float, float]]) -> None:
    lower = levels(policy, [(passed, min(one, other)) for passed, one, other in signal])
    higher = levels(policy, [(passed, max(one, other)) for passed, one, other in signal])
    assert all(low <= high for (_, low), (_, high) in zip(lower, higher, strict=True))


@given(policy=POLICIES, signal=SIGNALS)
def test_who_keeps_a_level_up_feels_it(policy: LadderPolicy, signal: list[tuple[int, float]]) -> None:
    """A request is spared a level only where its own pressure lets that fall; then all above are spared as well."""
    ladder, now_ms = Ladder(policy), 0
    for passed_ms, pressure in signal:
        now_ms += passed_ms
        level = ladder.level("gpu", "acme", pressure, now_ms)
        felt = ladder.felt(level, pressure)
        assert 0 <= felt <= level
        assert all(pressure >= policy.spared_ratio * policy.up_at[step] for step in range(felt))
        assert felt == level or pressure < policy.spared_ratio * policy.up_at[felt]


@given(policy=POLICIES, pressure=st.floats(0, 2.5), signal=SIGNALS)
def test_among_requests_of_one_pressure_it_is_the_level(
    policy: LadderPolicy, pressure: float, signal: list[tuple[int, float]]
) -> None:
    """Whatever was before: it has come down to what they feel once it had the time for it."""
    ladder, now_ms = Ladder(policy), 0
    for passed_ms, before in signal:
        now_ms += passed_ms
        ladder.level("gpu", "acme", before, now_ms)
    level = 0
    for _ in range(2 * len(policy.up_at) + 2):
        now_ms += policy.down_after_ms
        level = ladder.level("gpu", "acme", pressure, now_ms)
    assert ladder.felt(level, pressure) == level


@given(policy=POLICIES, signal=SIGNALS, other=st.integers(0, 10**6))
def test_a_pair_that_is_left_alone_is_forgotten(
    policy: LadderPolicy, signal: list[tuple[int, float]], other: int
) -> None:
    ladder, now_ms = Ladder(policy), 0
    for passed_ms, pressure in signal:
        now_ms += passed_ms
        ladder.level("gpu", "acme", pressure, now_ms)
    assert ladder.level("gpu", "another", 0.0, now_ms + policy.forget_after_ms + other) == 0
    assert len(ladder) == 0


# --- degrade


def test_the_retrieval_steps() -> None:
    def after(level: int, retrieval: Retrieval) -> tuple[Retrieval | None, tuple[str, ...]]:
        degraded = at(level, replace(HELLO, retrieval=retrieval))
        return degraded.request.retrieval, degraded.steps

    hybrid = Retrieval("docs", 5)
    assert after(0, hybrid) == (hybrid, ())
    assert after(1, hybrid) == (Retrieval("docs", 2), ("fewer_passages",))
    fewer = ("fewer_passages", "shorter_retrieval")
    assert after(2, hybrid) == (Retrieval("docs", 2), fewer)
    assert after(3, hybrid) == (Retrieval("docs", 2, "vector"), (*fewer, "vector_only"))
    assert after(4, hybrid) == (Retrieval("docs", 2, "cached"), (*fewer, "cached_only"))
    assert after(5, hybrid) == (None, ("no_retrieval",))
    only_cached = Retrieval("docs", 1, "cached")
    assert after(1, only_cached) == (only_cached, ())
    assert after(4, only_cached) == (only_cached, ("shorter_retrieval",))


def test_forbidden_steps_are_not_taken() -> None:
    forbidden = ("no_retrieval", "fewer_passages")
    assert at(5, LOOKED_UP, forbidden=forbidden).steps == ("shorter_retrieval", "cached_only")
    assert at(TOP, LOOKED_UP, forbidden=tuple(LADDER), smaller=SMALL, backfill=True) == Degraded(LOOKED_UP, LARGE)


def test_a_shorter_context_keeps_what_the_system_said_and_the_last_turns() -> None:
    long = chat(
        ("system", "s1"),
        ("user", "u1"),
        ("assistant", "a1"),
        ("user", "u2"),
        ("system", "s2"),
        ("assistant", "a2"),
        ("user", "u3"),
        ("assistant", "a3"),
        ("user", "u4"),
    )
    degraded = at(6, long)
    assert [message.content for message in degraded.request.input.messages or ()] == ["s1", "s2", "u3", "a3", "u4"]
    assert degraded.steps == ("shorter_context",)


def test_a_short_or_empty_conversation_is_left_alone() -> None:
    short = chat(("system", "s"), ("user", "u1"), ("assistant", "a1"), ("user", "u2"))
    empty_end = chat(("user", "u1"), *[("user", "")] * 4)
    only_a_prompt = replace(HELLO, input=RequestInput(prompt="word " * 1_000))
    for request in (short, empty_end, only_a_prompt):
        assert at(6, request).request == request


@pytest.mark.parametrize(
    ("max_tokens", "output", "capped"),
    [(None, 512, 128), (None, 100, 50), (None, 1, None), (None, 0, 128), (300, 512, 128), (60, 512, 60), (60, 100, 50)],
)
def test_the_cap_of_max_tokens(max_tokens: int | None, output: int, capped: int | None) -> None:
    request = chat(("user", "hello"), parameters=Parameters(max_tokens=max_tokens))
    degraded = degrade(request, 7, (), model("large", output=output), None, backfill=False)
    assert degraded.request.parameters.max_tokens == capped
    assert degraded.steps == (() if capped == max_tokens else ("capped_max_tokens",))


def test_only_generation_is_capped() -> None:
    embedding = InferenceRequest(ID, "large", "embed", RequestInput(texts=("a",)))
    assert at(8, embedding).steps == ()


def test_a_smaller_model_takes_over() -> None:
    degraded = at(8, HELLO, smaller=SMALL)
    assert degraded == Degraded(replace(HELLO, model="small"), SMALL, (Degradation.SMALLER_MODEL,))
    assert at(7, HELLO, smaller=SMALL).model is LARGE


@pytest.mark.parametrize(
    "unfit",
    [
        model("small", tasks=("embed",)),
        model("large", context=1_024),
        model("small", context=4),
    ],
    ids=["another task", "the same model", "no room"],
)
def test_a_smaller_model_that_does_not_fit_is_left_out(unfit: ModelVersion) -> None:
    assert at(8, HELLO, smaller=unfit) == Degraded(HELLO, LARGE)


def test_a_smaller_model_never_caps_in_disguise() -> None:
    asks_much = chat(("user", "hello"), parameters=Parameters(max_tokens=300))
    asks_nothing = chat(("user", "hello"))
    forbidden = ("capped_max_tokens",)
    assert at(8, asks_much, forbidden=forbidden, smaller=SMALL).model is LARGE
    assert at(8, asks_nothing, forbidden=forbidden, smaller=SMALL).model is LARGE
    tiny = model("small", output=64)
    degraded = at(8, asks_much, smaller=tiny)
    assert degraded.request.parameters.max_tokens == 64
    assert degraded.steps == ("capped_max_tokens", "smaller_model")
    asks_little = replace(asks_much, parameters=Parameters(max_tokens=100))
    assert at(8, asks_little, smaller=tiny).steps == ("capped_max_tokens", "smaller_model")


def test_backfill_is_deferred_whole() -> None:
    degraded = at(TOP, LOOKED_UP, smaller=SMALL, backfill=True)
    assert degraded == Degraded(LOOKED_UP, LARGE, (Degradation.DEFERRED,))
    assert degraded.deferred
    online = at(TOP, LOOKED_UP, smaller=SMALL)
    assert not online.deferred
    assert online == at(TOP - 1, LOOKED_UP, smaller=SMALL)


WORDS = st.sampled_from(("", "a", "é" * 20, "word " * 40))
MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(("system", "user", "assistant")), WORDS), min_size=1, max_size=14
).map(tuple)
INPUTS: dict[str, st.SearchStrategy[RequestInput]] = {
    "generate": st.builds(RequestInput, messages=MESSAGES) | st.builds(RequestInput, prompt=WORDS),
    "embed": st.builds(RequestInput, texts=st.just(("a", "b"))),
    "rank": st.builds(RequestInput, query=st.just("q"), documents=st.just(("a", "b"))),
}
OUTPUTS = st.sampled_from((0, 1, 2, 64, 100, 512))
CONTEXTS = st.sampled_from((1, 64, 300, 2_048))
ALL_TASKS = ("generate", "embed", "rank")
MODELS = st.builds(
    lambda context, output: model("large", context=context, output=output, tasks=ALL_TASKS), CONTEXTS, OUTPUTS
)
SMALLER = st.none() | st.builds(
    lambda context, output, tasks: model("small", context=context, output=output, tasks=tasks),
    CONTEXTS,
    OUTPUTS,
    st.sampled_from((ALL_TASKS, ("embed",))),
)
FORBIDDEN = st.frozensets(st.sampled_from(LADDER))
RETRIEVALS = st.none() | st.builds(
    Retrieval, st.just("docs"), st.integers(1, 64), st.sampled_from(("hybrid", "vector", "cached"))
)


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    task = draw(st.sampled_from(tuple(INPUTS)))
    return InferenceRequest(
        ID,
        "large",
        task,
        draw(INPUTS[task]),
        Parameters(max_tokens=draw(st.none() | st.sampled_from((1, 2, 63, 64, 65, 100, 128)))),
        retrieval=draw(RETRIEVALS),
    )


def is_valid(request: InferenceRequest, *models: ModelVersion | None) -> bool:
    known = catalog_of(*(known for known in models if known is not None))
    return isinstance(
        validate(request, "acme", TenantSpec("acme"), known, LIMITS, now_ms=0, backfill=False), ValidRequest
    )


def output_limit(request: InferenceRequest, served_by: ModelVersion) -> float:
    if request.task != "generate":
        return 0
    return request.parameters.max_tokens or served_by.max_output_tokens or math.inf


@given(
    request=requests(),
    large=MODELS,
    smaller=SMALLER,
    level=st.integers(0, TOP + 1),
    forbidden=FORBIDDEN,
    backfill=st.booleans(),
)
def test_whatever_is_degraded(
    request: InferenceRequest,
    large: ModelVersion,
    smaller: ModelVersion | None,
    level: int,
    forbidden: frozenset[str],
    backfill: bool,
) -> None:
    """What is listed was done, was allowed, is visible; the request stays valid and nothing in it got longer."""
    degraded = degrade(request, level, forbidden, large, smaller, backfill=backfill)
    after, steps = degraded.request, degraded.steps
    assert not set(steps) & forbidden
    assert len(set(steps)) == len(steps)
    assert list(steps) == sorted(steps, key=LADDER.index)
    assert all(LADDER.index(step) < level for step in steps)
    if degraded.deferred:
        assert (backfill, after, degraded.model, steps) == (True, request, large, (Degradation.DEFERRED,))
        return
    # The time of a look-up is nothing that stands in a request.
    assert (after == request and degraded.model is large) == (not set(steps) - {"shorter_retrieval"})

    before_, after_ = request.retrieval, after.retrieval
    assert ("no_retrieval" in steps) == (before_ is not None and after_ is None)
    if after_ is not None:
        assert before_ is not None
        assert after_.top_k <= before_.top_k
        assert ("fewer_passages" in steps) == (after_.top_k < before_.top_k)
        assert ("shorter_retrieval" in steps) == (level >= 2 and "shorter_retrieval" not in forbidden and not backfill)
        order = ("hybrid", "vector", "cached")
        assert order.index(after_.mode) >= order.index(before_.mode)
        assert ({"vector": "vector_only", "cached": "cached_only"}.get(after_.mode) in steps) == (
            after_.mode != before_.mode
        )
    else:
        assert not {"fewer_passages", "shorter_retrieval", "vector_only", "cached_only"} & set(steps)
    assert ("shorter_context" in steps) == (after.input != request.input)
    assert size_of_input(after.input) <= size_of_input(request.input)
    assert [m for m in after.input.messages or () if m.role == "system"] == [
        m for m in request.input.messages or () if m.role == "system"
    ]
    assert (after.input.messages or ())[-1:] == (request.input.messages or ())[-1:] or (
        request.input.messages is not None and request.input.messages[-1].role == "system"
    )
    assert ("smaller_model" in steps) == (degraded.model is not large)
    assert after.model == degraded.model.model
    assert after.task in degraded.model.tasks
    assert output_limit(after, degraded.model) <= output_limit(request, large)
    assert ("capped_max_tokens" in steps) == (output_limit(after, degraded.model) < output_limit(request, large))
    assert is_valid(after, large, smaller) or not is_valid(request, large, smaller)


@given(request=requests(), large=MODELS, smaller=SMALLER, forbidden=FORBIDDEN)
def test_a_higher_level_never_leaves_more(
    request: InferenceRequest, large: ModelVersion, smaller: ModelVersion | None, forbidden: frozenset[str]
) -> None:
    def size(level: int) -> tuple[float, ...]:
        degraded = degrade(request, level, forbidden, large, smaller, backfill=False)
        retrieval = degraded.request.retrieval
        return (
            0 if retrieval is None else retrieval.top_k,
            size_of_input(degraded.request.input),
            output_limit(degraded.request, degraded.model),
        )

    for lower, higher in pairwise(size(level) for level in range(TOP + 1)):
        assert all(less <= more for less, more in zip(higher, lower, strict=True))


# --- what is handed back


def passages(count: int) -> tuple[Passage, ...]:
    return tuple(Passage(str(rank), "text", 1 / (1 + rank)) for rank in range(count))


TALK = chat(("system", "s"), *[("user", "u"), ("assistant", "a")] * 3, ("user", "end"), retrieval=Retrieval("docs", 4))


def test_what_was_handed_back_is_tried_with_less() -> None:
    reduced = reduced_context(TALK, passages(3))
    assert [passage.passage_id for passage in reduced.passages] == ["0"]
    assert reduced.request.retrieval == Retrieval("docs", 2)
    assert [message.content for message in reduced.request.input.messages or ()] == ["s", "end"]
    assert reduced.steps == ("fewer_passages", "shorter_context")
    assert replace(reduced.request, input=TALK.input, retrieval=TALK.retrieval) == TALK


def test_what_was_degraded_is_reduced_further() -> None:
    degraded = degrade(TALK, 5, ("no_retrieval",), LARGE, None, backfill=False)
    reduced = reduced_context(degraded.request, passages(1))
    assert reduced.passages == ()
    assert len(reduced.request.input.messages or ()) < len(degraded.request.input.messages or ())
    assert reduced.steps == ("fewer_passages", "shorter_context"), "taken once more"


def test_what_a_tenant_forbids_stays() -> None:
    forbidden = ("fewer_passages", "shorter_context")
    assert reduced_context(TALK, passages(3), forbidden) == Reduced(TALK, passages(3))
    assert reduced_context(TALK, passages(3), ("shorter_context",)).steps == ("fewer_passages",)


def test_what_has_nothing_to_spare_comes_back_as_it_is() -> None:
    assert reduced_context(HELLO, ()) == Reduced(HELLO, ())


@given(request=requests(), count=st.integers(0, 9), forbidden=FORBIDDEN)
def test_what_is_reduced_is_no_larger_and_valid(
    request: InferenceRequest, count: int, forbidden: frozenset[str]
) -> None:
    reduced = reduced_context(request, passages(count), forbidden)
    large = model("large", tasks=ALL_TASKS)
    assert len(reduced.passages) <= count
    assert size_of_input(reduced.request.input) <= size_of_input(request.input)
    assert is_valid(reduced.request, large) or not is_valid(request, large)
    assert not set(reduced.steps) & forbidden
    assert (reduced == Reduced(request, passages(count))) == (not reduced.steps)
