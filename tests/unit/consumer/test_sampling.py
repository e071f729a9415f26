"""The choice of tokens: every row by its own parameters, whatever rows stand beside it."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import Parameters
from inference_consumers.engines import sampling
from inference_consumers.engines.sampling import Logprobs, Sampler, choose_tokens, logprobs_of

DRAWS = 4000
PROBABILITIES = (0.5, 0.25, 0.125, 0.0625, 0.0625)


def counted(temperature: float, top_p: float) -> dict[int, float]:
    """The share of each token when it is drawn often from PROBABILITIES, in rows together."""
    logits = torch.tensor(PROBABILITIES).log().repeat(100, 1)
    samplers = [Sampler.of(Parameters(temperature=temperature, top_p=top_p, seed=seed)) for seed in range(100)]
    counts = Counter(token for _ in range(DRAWS // 100) for token in choose_tokens(logits, samplers))
    return {token: count / DRAWS for token, count in counts.items() if token is not None}


@pytest.mark.parametrize(
    ("temperature", "top_p", "expected"),
    [
        (1.0, 1.0, PROBABILITIES),
        (0.5, 1.0, [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]),
        (1.0, 0.7, [2 / 3, 1 / 3]),
        (1.0, 0.5, [1.0]),
        (1.0, 1e-9, [1.0]),
        (1.0, 0.0, [1.0]),
        (1e-40, 1.0, [1.0]),
    ],
)
def test_tokens_come_as_often_as_their_probabilities_say(
    temperature: float, top_p: float, expected: list[float]
) -> None:
    shares = counted(temperature, top_p)
    assert set(shares) == set(range(len(expected)))
    for token, share in enumerate(expected):
        assert shares[token] == pytest.approx(share, abs=0.03)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0, 5.0]), st.sampled_from([1e-9, 0.3, 0.9, 1.0]), st.integers(0, 9)),
        min_size=1,
        max_size=20,
    ),
    st.randoms(use_true_random=False),
)
def test_a_row_gets_the_token_that_it_gets_alone(rows: list[tuple[float, float, int]], random: object) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), 400, generator=generator) * 2
    parameters = [Parameters(temperature=heat, top_p=top_p, seed=seed) for heat, top_p, seed in rows]
    together = choose_tokens(logits, [Sampler.of(one) for one in parameters])
    alone = [choose_tokens(logits[row : row + 1], [Sampler.of(one)])[0] for row, one in enumerate(parameters)]
    assert together == alone


def test_a_nucleus_of_any_size_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(30, 600, generator=torch.Generator().manual_seed(1))
    parameters = [Parameters(temperature=3.0, top_p=0.05 + 0.03 * row, seed=row) for row in range(30)]

    def chosen() -> list[int | None]:
        return choose_tokens(logits, [Sampler.of(one) for one in parameters])

    monkeypatch.setattr(sampling, "_NUCLEUS_SIZES", (1 << 62,))
    by_sorting = chosen()
    for sizes in ((2, 50, 1 << 62), (600, 1 << 62), (599, 1 << 62)):
        monkeypatch.setattr(sampling, "_NUCLEUS_SIZES", sizes)
        assert chosen() == by_sorting


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_token_of_no_probability_is_never_drawn(monkeypatch: pytest.MonkeyPatch, top_p: float) -> None:
    logits = torch.full((50, 1000), -math.inf)
    logits[:, [3, 990]] = 0.0
    samplers = [Sampler.of(Parameters(temperature=1.0, top_p=top_p, seed=seed)) for seed in range(50)]
    assert set(choose_tokens(logits, samplers)) == {3, 990}
    # A draw just below 1 becomes 1 where it is rounded.
    monkeypatch.setattr(Sampler, "draw", lambda _: 1.0)
    assert set(choose_tokens(logits, samplers)) <= {3, 990}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_unusable_logits_give_no_token_and_leave_the_other_rows_alone(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[-99.0, 1.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0], [-math.inf, -math.inf]])
    samplers = [Sampler.of(Parameters(temperature=temperature, top_p=top_p, seed=1)) for _ in range(5)]
    assert choose_tokens(logits, samplers) == [1, None, None, 1, None]


def test_log_probabilities_are_given_to_those_who_ask() -> None:
    logits = torch.tensor(PROBABILITIES).log().repeat(4, 1) + torch.tensor([[0.0], [7.0], [0.0], [math.nan]])
    first, none, second, broken = logprobs_of(logits, [2, 0, 0, None], [0, None, 2, 3])
    assert (none, broken) == (None, None)
    assert first is not None
    assert second is not None
    assert first.chosen == pytest.approx(math.log(0.125))
    assert first.top == ()
    assert second.chosen == pytest.approx(math.log(0.5))
    assert [token for token, _ in second.top] == [0, 1]
    assert [logprob for _, logprob in second.top] == pytest.approx([math.log(0.5), math.log(0.25)])


def test_a_token_that_cannot_come_is_no_alternative() -> None:
    [found] = logprobs_of(torch.tensor([[0.0, -math.inf, -math.inf]]), [0], [3])
    assert found == Logprobs(0.0, ((0, 0.0),))
