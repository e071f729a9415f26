"""Vectors, rankings by vectors, and what engines share that only read texts: groups, bounds, items that are wrong."""

from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fairlane.outcomes import Code
from fairlane.records import MOST_INPUT_ITEMS, TokenUsage
from fairlane_server.models.models_file import load_models
from inference_consumers.engines.encoders import EmbeddingEngine
from inference_consumers.engines.protocol import (
    CancelledItem,
    Engine,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    Outcomes,
    RunCost,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from tests.kit.encoder_kit import (
    ENCODER,
    MODELS_DIR,
    PROJECT,
    TEXTS,
    THREADS,
    TINY,
    embed,
    loaded,
    prepared_tokenizer,
    rank,
    save_encoder,
    scores_of,
    tokens_of,
    vectors_of,
)

pytestmark = [pytest.mark.full, pytest.mark.model]

LIMITS = EngineLimits(max_batch_size=32, max_batch_tokens=16_384, max_context_tokens=256, max_output_tokens=0)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerBase) -> Engine:
    return loaded(ENCODER, LIMITS)


@pytest.fixture(scope="module")
def tiny_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(folder, tokenizer)
    return folder


# --- answers ----------------------------------------------------------------------------------------------------


def test_vectors_have_length_one_and_meaning_decides_the_cosine(encoder: Engine) -> None:
    [outcome] = run_batch(encoder, [embed(*TEXTS)])
    music, instrument, money = map(torch.tensor, vectors_of(outcome))
    assert [vector.norm().item() for vector in (music, instrument, money)] == pytest.approx([1.0] * 3, abs=1e-5)
    assert float(music @ instrument) > 0.5
    assert float(music @ money) < 0.2


def test_ranking_puts_the_right_documentation_first(encoder: Engine) -> None:
    named = ("while", "lambda", "import", "del", "assert", "try")
    passages = [" ".join(topics[name].split())[:300] for name in named]
    questions = {
        "repeat a block for as long as a condition is true": "while",
        "create an anonymous function in one expression": "lambda",
        "load a module and bind its name": "import",
        "remove a name or an item of a list": "del",
        "check a condition while debugging and fail when it is false": "assert",
        "handle exceptions that are raised in a block": "try",
    }
    # In one batch: a ranking must not take another's vectors.
    outcomes = run_batch(encoder, [rank(question, *passages) for question in questions])
    for outcome, name in zip(outcomes, questions.values(), strict=True):
        scores = scores_of(outcome)
        assert len(scores) == len(passages)
        assert named[scores.index(max(scores))] == name


def test_usage_counts_every_text_with_its_own_tokens(encoder: Engine) -> None:
    outcomes = run_batch(encoder, [embed("hello"), embed("hello", "hello"), rank("hello", "hello", "hello")])
    assert [tokens_of(outcome) for outcome in outcomes] == [3, 6, 9]


def test_a_small_token_budget_changes_no_vector(encoder: Engine) -> None:
    frugal = loaded(ENCODER, replace(LIMITS, max_batch_tokens=40, max_context_tokens=64))
    item = embed(*["word " * length for length in (1, 30, 2, 50, 3, 20)])
    [in_small_groups], [at_once] = run_batch(frugal, [item]), run_batch(encoder, [item])
    assert torch.allclose(torch.tensor(vectors_of(in_small_groups)), torch.tensor(vectors_of(at_once)), atol=1e-5)


@pytest.mark.parametrize(
    ("int8", "dtype", "least_cosine"),
    [(False, "bfloat16", 0.999), (True, "float32", 0.99), (True, "bfloat16", 0.99)],
)
def test_smaller_numbers_hardly_turn_a_vector(encoder: Engine, int8: bool, dtype: str, least_cosine: float) -> None:
    smaller = loaded(ENCODER, LIMITS, int8=int8, dtype=dtype)
    exact, rounded = (torch.tensor(vectors_of(run_batch(engine, [embed(*TEXTS)])[0])) for engine in (encoder, smaller))
    cosines = (exact * rounded).sum(-1)
    assert cosines.min() >= least_cosine
    assert cosines.max() < 1 - 1e-6, "nothing was made smaller"


def test_models_yaml_says_how_a_model_is_loaded(tiny_folder: Path) -> None:
    [model] = [model for model in load_models(PROJECT / "deploy/models.yaml") if model.engine == "torch-embedding"]
    model = replace(model, path=tiny_folder.name, max_context_tokens=64)

    def vectors(**options: str) -> tuple[tuple[float, ...], ...]:
        engine = create_engine(EngineSpec(replace(model, **options), str(tiny_folder.parent), THREADS, device="cpu"))  # type: ignore[arg-type] # strings, all
        engine.load()
        return vectors_of(run_batch(engine, [embed("hello")])[0])

    assert len({vectors(), vectors(dtype="bfloat16"), vectors(quantization="int8")}) == 3
    with pytest.raises(EngineLoadError, match="knows no quantization 'awq', only 'int8'"):
        vectors(quantization="awq")
    with pytest.raises(EngineLoadError, match="all-minilm-l6-v2: there is no device cuda:99"):
        create_engine(EngineSpec(model, str(MODELS_DIR), THREADS, device="cuda:99"))


# --- groups -----------------------------------------------------------------------------------------------------


class Impatient(Outcomes):
    """Cancels an item after so many steps."""

    def __init__(self, index: int, after_steps: int) -> None:
        super().__init__()
        self._index = index
        self._after_steps = after_steps

    def step(self) -> None:
        super().step()
        if self.steps >= self._after_steps:
            self.cancelled.add(self._index)


def test_thousands_of_texts_are_run_in_small_groups(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(tiny_folder)
    sizes: list[int] = []
    compute = EmbeddingEngine.compute

    def watched(self: EmbeddingEngine, network: object, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(inputs["input_ids"].numel())
        return compute(self, network, inputs)

    monkeypatch.setattr(EmbeddingEngine, "compute", watched)
    documents = [f"word number {number}" + " and more" * (number % 20) for number in range(MOST_INPUT_ITEMS)]
    outcomes = Outcomes()
    cost = engine.run([rank("word number 7", *documents)], outcomes)
    scores = scores_of(outcomes.by_index[0])
    assert len(scores) == MOST_INPUT_ITEMS
    assert max(sizes) <= TINY.max_batch_tokens
    assert outcomes.steps == len(sizes) + 1
    assert cost == RunCost(tokens_of(outcomes.by_index[0]), sum(sizes))
    assert cost.computed_tokens < 1.05 * cost.useful_tokens
    chosen = [3, 700, 4_000]
    [alone] = run_batch(engine, [rank("word number 7", *[documents[index] for index in chosen])])
    assert scores_of(alone) == pytest.approx([scores[index] for index in chosen], abs=1e-5)


@pytest.mark.parametrize("task", ["texts", "documents"])
def test_more_texts_than_any_request_may_have_are_refused(tiny_folder: Path, task: str) -> None:
    texts = ["word"] * 10_000
    refused, fine = run_batch(
        loaded(tiny_folder), [embed(*texts) if task == "texts" else rank("query", *texts), embed("fine")]
    )
    assert refused == Failure(Code.INVALID, f"10000 items are more than {MOST_INPUT_ITEMS}", f"input.{task}")
    assert len(vectors_of(fine)) == 1


def test_a_cancelled_item_stops_between_groups_and_says_what_it_cost(tiny_folder: Path) -> None:
    engine = loaded(tiny_folder)
    item = embed(*["word " * 60] * 100)
    whole, cut = Outcomes(), Impatient(0, after_steps=4)
    cost = engine.run([item, embed("fine")], whole)
    less = engine.run([item, embed("fine")], cut)
    assert len(vectors_of(cut.by_index[1])) == 1
    # Two steps for the items to become tokens, and two groups: eight texts, the short one among them, and eight more.
    assert cut.by_index[0] == CancelledItem(TokenUsage(prompt_tokens=15 * 62))
    assert tokens_of(whole.by_index[0]) == 100 * 62
    assert less.useful_tokens == 15 * 62 + 3
    assert cost.useful_tokens == 100 * 62 + 3

    at_once = Outcomes(cancelled=(0,))
    engine.run([item], at_once)
    assert at_once.by_index[0] == CancelledItem(TokenUsage())


class Diary(Outcomes):
    """What was told before which step."""

    def __init__(self) -> None:
        super().__init__()
        self.told_at: dict[int, int] = {}

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        super().finished(index, outcome)
        self.told_at[index] = self.steps


def test_a_short_item_does_not_wait_for_a_long_one(tiny_folder: Path) -> None:
    diary = Diary()
    loaded(tiny_folder).run([embed(*["word " * 60] * 50), embed("short"), embed()], diary)
    assert diary.told_at == {2: 2, 1: 3, 0: diary.steps - 1}


# --- items that cannot be answered ------------------------------------------------------------------------------


def test_what_is_too_long_missing_or_beyond_the_tenants_limit_is_named(tiny_folder: Path) -> None:
    long = "word " * 63
    too_long = "the text has 65 tokens; the context holds 64"
    limited = replace(embed("one two", "three"), max_prompt_tokens=6)
    items = {
        embed("fine", long): Failure(Code.CONTEXT_TOO_LONG, too_long, "input.texts[1]"),
        rank("q", "fine", long): Failure(Code.CONTEXT_TOO_LONG, too_long, "input.documents[1]"),
        rank(long, "fine"): Failure(Code.CONTEXT_TOO_LONG, too_long, "input.query"),
        embed(): Failure(Code.INVALID, "at least one is needed", "input.texts"),
        rank("q"): Failure(Code.INVALID, "at least one is needed", "input.documents"),
        rank(None, "fine"): Failure(Code.INVALID, "a query is needed", "input.query"),
        replace(embed("a"), task="generate"): Failure(Code.INVALID, "this engine does not do 'generate'", "task"),
        limited: Failure(Code.CONTEXT_TOO_LONG, "the input has 7 tokens; the tenant's limit is 6", "input"),
    }
    outcomes = run_batch(loaded(tiny_folder), [item for bad in items for item in (bad, embed("fine"))])
    assert outcomes[::2] == list(items.values())
    assert {vectors_of(outcome) for outcome in outcomes[1::2]} == {vectors_of(outcomes[1])}
    [allowed] = run_batch(loaded(tiny_folder), [replace(limited, max_prompt_tokens=7)])
    assert tokens_of(allowed) == 7


def test_an_empty_text_has_a_vector_where_the_tokenizer_frames_it(tiny_folder: Path, tmp_path: Path) -> None:
    [framed] = run_batch(loaded(tiny_folder), [embed("", " ", "\u200b")])
    assert tokens_of(framed) == 6
    assert len(vectors_of(framed)) == 3

    plain = Tokenizer(WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    save_encoder(tmp_path, PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]"))
    bare, fine = run_batch(loaded(tmp_path), [embed("one", " "), embed("one")])
    assert bare == Failure(Code.INVALID, "the text has no tokens", "input.texts[1]")
    assert tokens_of(fine) == 1


def test_the_names_of_control_tokens_are_characters(tiny_folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    [outcome] = run_batch(loaded(tiny_folder), [embed("[CLS] [SEP]")])
    assert tokens_of(outcome) == len(tokenizer("[ cls ] [ sep ]")["input_ids"])


def test_a_value_that_is_not_a_number_fails_its_item_only(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    save_encoder(tmp_path, tokenizer, broken_token=tokenizer.convert_tokens_to_ids("sea"))
    failure = Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
    for int8 in (False, True):
        items = [embed("a long way"), embed("a long way", "the sea shore"), rank("a way", "the shore")]
        before, broken, after = run_batch(loaded(tmp_path, int8=int8), items)
        assert len(vectors_of(before)) == len(scores_of(after)) == 1
        assert broken == failure
