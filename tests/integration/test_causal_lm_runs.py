"""A run of the language model engine, on random models that answer in no time: steps, cancelling, log probabilities,
and answers that are none. Held against transformers, which computes every token from the whole text."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Parameters, TokenUsage
from inference_consumers.engines.causal_lm import CausalLmEngine
from inference_consumers.engines.protocol import CancelledItem, Failure, RunCost, Success, run_batch
from tests.kit.encoder_kit import prepared_tokenizer
from tests.kit.engine_kit import (
    LANGUAGE_MODEL,
    Watcher,
    chat,
    complete,
    load_tiny,
    save_parrot,
    save_random,
    save_tiny_model,
    streamed,
    text_of,
)

pytestmark = [pytest.mark.full, pytest.mark.model]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer(LANGUAGE_MODEL)


@pytest.fixture(scope="module")
def tiny_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> CausalLmEngine:
    return load_tiny(tiny_folder)


@pytest.fixture(scope="module")
def tiny_network(tiny: CausalLmEngine, tiny_folder: Path) -> LlamaForCausalLM:
    """The same weights, run by transformers."""
    return LlamaForCausalLM.from_pretrained(tiny_folder).eval()


def greedy_tokens(network: PreTrainedModel, prompt_ids: Sequence[int], count: int) -> list[int]:
    """As nobody would generate: the whole text anew for every token."""
    ids = list(prompt_ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt_ids) :]


# --- steps ----------------------------------------------------------------------------------------------------


def llama(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    return save_tiny_model(folder, tokenizer)


def sliding_windows(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = MistralConfig(vocab_size=len(tokenizer), sliding_window=8, **sizes, **heads)
    return save_random(folder, tokenizer, MistralForCausalLM(config))


def learned_positions(folder: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2)
    return save_random(folder, tokenizer, GPT2LMHeadModel(config))


@pytest.mark.parametrize("build", [llama, sliding_windows, learned_positions])
def test_rows_that_come_and_go_get_the_tokens_that_they_get_alone(
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[Path, PreTrainedTokenizerBase], PreTrainedModel],
) -> None:
    monkeypatch.setattr("inference_consumers.engines.kv_cache._FIRST_ROOM", 3)
    network = build(tmp_path, tokenizer)
    prompts = ["sea", "The sun rises in the", "one " * 15, "a b c d", "water and fire " * 5, "x", "why not"]
    lengths = [9, 30, 4, 1, 17, 40, 2]
    outcomes = run_batch(load_tiny(tmp_path), [complete(*pair) for pair in zip(prompts, lengths, strict=True)])
    for prompt, length, outcome in zip(prompts, lengths, outcomes, strict=True):
        expected = greedy_tokens(network, tokenizer(prompt).input_ids, length)
        assert network.generation_config.eos_token_id not in expected
        assert text_of(outcome) == tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")


@pytest.mark.parametrize("budget", [1, 7, 20, 10_000])
def test_a_prefill_in_parts_changes_no_answer_and_every_part_is_a_step(
    tiny: CausalLmEngine, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    items = [complete("sea " * count, max_tokens=6) for count in (3, 20, 9, 1, 20)]
    expected = run_batch(tiny, items)
    monkeypatch.setattr("inference_consumers.engines.causal_lm._CPU_PREFILL_TOKENS", budget)
    watcher = Watcher()
    cost = tiny.run(items, watcher)
    assert [watcher.by_index[index] for index in range(len(items))] == expected
    lengths = sorted(
        (outcome.usage.prompt_tokens for outcome in expected if isinstance(outcome, Success)), reverse=True
    )
    assert cost.useful_tokens == sum(lengths) + 5 * 6
    if budget == 1:
        assert watcher.steps == sum(lengths) + 5
        assert cost.computed_tokens == cost.useful_tokens
    if budget == 10_000:
        assert watcher.steps == 1 + 5
        assert cost.computed_tokens == 5 * max(lengths) + 5 * 6


def test_an_item_cancelled_in_the_middle_ends_at_the_next_step_with_what_it_cost(tiny: CausalLmEngine) -> None:
    items = [streamed(complete("The sun rises", max_tokens=40)) for _ in range(3)]
    whole = Watcher()
    tiny.run(items, whole)
    cut = Watcher(cancel_after={1: 10})
    cost = tiny.run(items, cut)
    assert cut.by_index[1] == CancelledItem(TokenUsage(prompt_tokens=3, completion_tokens=10))
    assert cut.finished_at[1] == 10
    assert whole.text_of(1).startswith(cut.text_of(1))
    assert cut.text_of(1) not in {"", whole.text_of(1)}
    for index in (0, 2):
        assert cut.by_index[index] == whole.by_index[index]
    assert cost == RunCost(3 * 3 + 2 * 40 + 10, 3 * 3 + 2 * 40 + 10)


def test_a_prompt_cancelled_in_the_middle_is_computed_no_further(
    tiny: CausalLmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference_consumers.engines.causal_lm._CPU_PREFILL_TOKENS", 10)
    watcher = Watcher(cancel_after={0: 2, 2: 1})
    tiny.run([complete("word " * 45), complete("sea"), complete("word " * 3)], watcher)
    assert watcher.by_index[0] == CancelledItem(TokenUsage(prompt_tokens=20))
    assert watcher.by_index[2] == CancelledItem(TokenUsage())
    assert isinstance(watcher.by_index[1], Success)


def test_log_probabilities_are_those_of_the_model_before_any_temperature(
    tiny: CausalLmEngine, tiny_network: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt = "The sun rises in the"
    asked = [(0.0, 3), (2.0, 5), (0.0, 0), (0.0, None)]
    items = [
        replace(complete(prompt), parameters=Parameters(8, temperature=heat, seed=3, logprobs=count))
        for heat, count in asked
    ]
    outcomes = run_batch(tiny, [*items, complete("x " * 20)])
    for (_, count), outcome in zip(asked, outcomes, strict=False):
        assert isinstance(outcome, Success)
        found = outcome.output.logprobs
        if count is None:
            assert found is None
            continue
        assert found is not None
        prompt_ids = tokenizer(prompt).input_ids
        ids = list(prompt_ids)
        for entry in found:
            with torch.inference_mode():
                expected = tiny_network(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            likeliest = expected.topk(count)
            assert [top.logprob for top in entry.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)
            assert [top.token for top in entry.top] == [tokenizer.decode([token]) for token in likeliest.indices]
            as_likely = (expected - entry.logprob).abs().less(1e-4).nonzero()[:, 0].tolist()
            [chosen] = [token for token in as_likely if tokenizer.decode([token]) == entry.token]
            ids.append(chosen)
        written = tokenizer.decode(ids[len(prompt_ids) :])
        assert written.rstrip("\ufffd") == text_of(outcome)


# --- answers that are none --------------------------------------------------------------------------------------


def test_a_value_that_is_not_a_number_fails_its_item_only(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    [broken_token] = tokenizer(" sea").input_ids
    save_tiny_model(tmp_path, tokenizer, broken_token=broken_token)
    items = [chat("Hello", 3), chat("A long way to the sea shore", 3, temperature=1.0, logprobs=2), chat("Hi", 3)]
    before, broken, after = run_batch(load_tiny(tmp_path), items)
    assert isinstance(before, Success)
    assert isinstance(after, Success)
    assert broken == Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")


def test_characters_of_many_tokens_are_streamed_whole_and_halves_are_no_answer(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    long = tokenizer("\N{GRINNING FACE} shines").input_ids
    half = tokenizer("\N{CJK UNIFIED IDEOGRAPH-65E5}").input_ids[:1]
    control = tokenizer.convert_tokens_to_ids("<|im_start|>")
    bytes_alone = [token for token in range(300) if tokenizer.decode([token]) == "\ufffd" and token not in long + half]
    answers = {"": tokenizer("fine").input_ids, " sun": long, " half": half, " control": [control]}
    save_parrot(tmp_path, tokenizer, answers | {" bytes": bytes_alone[:6]})
    watcher = Watcher()
    items = [complete("the sun", 20), replace(complete("the sun"), parameters=Parameters(20, logprobs=0))]
    no_text = [complete("a half", 20), complete("a control", 20), complete("the sun", 2), complete("all bytes", 20)]
    load_tiny(tmp_path).run([*map(streamed, [*items, *no_text]), complete("anything")], watcher)
    assert watcher.texts[0] == watcher.texts[1] == ["\N{GRINNING FACE}", " shines"]
    whole, probable, *without, fine = (watcher.by_index[index] for index in range(7))
    assert isinstance(whole, Success)
    assert whole.usage.completion_tokens == len(long) + 1
    assert isinstance(probable, Success)
    assert probable.output.logprobs is not None
    assert [entry.token for entry in probable.output.logprobs] == [tokenizer.decode([token]) for token in long]
    counts = (2, 2, 2, 7)
    failures = [Failure(Code.ENGINE_ERROR, f"the model wrote {count} tokens that are no text") for count in counts]
    assert without == failures
    assert text_of(fine) == "fine"


def test_half_a_character_at_the_end_is_cut_off(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    ends_in_half = tokenizer("sunny\N{GRINNING FACE}").input_ids[:-1]
    save_parrot(tmp_path, tokenizer, {"": ends_in_half})
    [outcome] = run_batch(load_tiny(tmp_path), [complete("how is it", 20)])
    assert isinstance(outcome, Success)
    assert (outcome.output.text, outcome.finish_reason) == ("sunny", FinishReason.STOP)
    assert outcome.usage.completion_tokens == len(ends_in_half) + 1
