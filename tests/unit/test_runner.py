"""A batch on an engine that may fail: the failure of one item stays the failure of one item."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.records import Output, Parameters, RequestInput, TokenUsage
from inference_consumers.engines.protocol import EngineItem, EngineLimits, Failure, ItemOutcome, Success
from inference_consumers.runner import run_batch

LIMITS = EngineLimits(32, 16_384, 4_096, 512)


class ScriptedEngine:
    """Does with a batch what the test says, and remembers the sizes it was given."""

    name = "scripted"
    limits = LIMITS

    def __init__(self, run: Callable[[Sequence[EngineItem]], list[ItemOutcome]]) -> None:
        self._run = run
        self.sizes: list[int] = []

    def load(self) -> None: ...

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        self.sizes.append(len(batch))
        return self._run(batch)

    def close(self) -> None: ...


def items(count: int) -> list[EngineItem]:
    return [EngineItem(f"id-{number}", "generate", RequestInput(prompt="p"), Parameters()) for number in range(count)]


def success(item: EngineItem) -> Success:
    return Success(Output(text=item.item_id), TokenUsage())


@given(st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1)))))
def test_exactly_the_poisonous_items_fail(case: tuple[int, set[int]]) -> None:
    count, poison = case
    bad = {f"id-{number}" for number in poison}

    def run(batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        if bad & {item.item_id for item in batch}:
            raise MemoryError
        return [success(item) for item in batch]

    engine = ScriptedEngine(run)
    batch = items(count)
    outcomes = run_batch(engine, batch)
    for number, (item, outcome) in enumerate(zip(batch, outcomes, strict=True)):
        if number in poison:
            assert isinstance(outcome, Failure)
            assert outcome.code == Code.POISON
        else:
            assert outcome == success(item)
    # Halving: about 2·log2(n) more runs for each poisonous item, never one for every item of a good batch.
    assert len(engine.sizes) <= 1 + 2 * len(poison) * count.bit_length()


def test_a_good_batch_runs_once() -> None:
    engine = ScriptedEngine(lambda batch: [success(item) for item in batch])
    assert len(run_batch(engine, items(8))) == 8
    assert engine.sizes == [8]


def test_failures_that_the_engine_reports_itself_are_its_answer() -> None:
    too_long = Failure(Code.CONTEXT_TOO_LONG, "too long")
    engine = ScriptedEngine(lambda batch: [too_long for _ in batch])
    assert run_batch(engine, items(3)) == [too_long] * 3
    assert engine.sizes == [3]


@pytest.mark.parametrize("count", [0, 2, 4])
def test_an_engine_that_loses_count_fails_its_batch(count: int) -> None:
    engine = ScriptedEngine(lambda batch: [success(batch[0])] * count)
    outcomes = run_batch(engine, items(3))
    assert {outcome.code for outcome in outcomes if isinstance(outcome, Failure)} == {Code.ENGINE_ERROR}
    assert len(outcomes) == 3


def test_neither_log_nor_reply_quotes_what_an_engine_raised(capsys: pytest.CaptureFixture[str]) -> None:
    def run(batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        raise ValueError(f"cannot read {batch[0].input.prompt} of a secret")

    (outcome,) = run_batch(ScriptedEngine(run), items(1))
    assert isinstance(outcome, Failure)
    assert "ValueError" in outcome.message
    assert "secret" not in outcome.message
    assert "secret" not in "".join(capsys.readouterr())
