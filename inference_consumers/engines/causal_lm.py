"""Text generation with any causal language model that transformers loads.

One run answers a whole micro-batch: prompts are padded on the left, prefilled together, and decoded together
with a key-value cache. Every row has its own length, stop strings and sampling, and leaves when it is done.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, FinishReason, Task
from fairlane.records import Message, Output, Parameters, RequestInput, TokenUsage
from inference_consumers.engines.pretrained import load_pretrained
from inference_consumers.engines.prompts import PromptEncoder, PromptError
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    ItemOutcome,
    Success,
)
from inference_consumers.engines.sampling import Sampler, choose_tokens
from inference_consumers.engines.threads import use_threads

# Copying the cache costs about as much as a decode step, so rows leave it in groups.
_COMPACT_AT = 0.75


@dataclass(frozen=True, slots=True)
class _Loaded:
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    end_ids: frozenset[int]
    pad_id: int


@dataclass(slots=True)
class _Row:
    """One item while it is generated."""

    prompt_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    sampler: Sampler | None
    token_ids: list[int] = field(default_factory=list)
    outcome: ItemOutcome | None = None

    def accept(self, token_id: int | None, end_ids: frozenset[int], decode: Callable[[list[int]], str]) -> None:
        """Take the next token; sets ``outcome`` if it was the last. None: no usable number was computed."""
        if token_id is None:
            self.outcome = Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
            return
        self.token_ids.append(token_id)
        if token_id in end_ids:
            if len(self.token_ids) == 1:
                self.outcome = Failure(Code.ENGINE_ERROR, "the model ended its answer before the first token")
            else:
                self._finish(decode(self.token_ids), FinishReason.STOP)
            return
        if self.stop:
            text = decode(self.token_ids)
            cuts = [cut for cut in (text.find(stop) for stop in self.stop) if cut >= 0]
            if cuts:
                self._finish(text[: min(cuts)], FinishReason.STOP)
                return
        if len(self.token_ids) >= self.max_tokens:
            self._finish(decode(self.token_ids), FinishReason.LENGTH)

    def _finish(self, text: str, reason: FinishReason) -> None:
        # The end token and the tokens of a stop string count: each was a decode step that somebody paid for.
        usage = TokenUsage(prompt_tokens=len(self.prompt_ids), completion_tokens=len(self.token_ids))
        self.outcome = Success(Output(text=text), usage, reason)


class CausalLmEngine:
    """``torch-causal-lm``: a transformers folder on the CPU.

    Float32 is the default because it keeps a greedy answer independent of its neighbours in a batch, but for
    near-exact ties. In bfloat16 the two best tokens are often within rounding of each other, and the rounding
    depends on the shape of the batch. float32 was no slower on the CPU measured; bfloat16 halves the memory.
    """

    name = "torch-causal-lm"

    def __init__(
        self, model: str, path: Path, limits: EngineLimits, threads: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._dtype = dtype
        self._loaded: _Loaded | None = None

    def load(self) -> None:
        """Load and generate one token. Raises EngineLoadError."""
        use_threads(self._threads)
        network, tokenizer = load_pretrained(AutoModelForCausalLM, self._model, self._path, self._dtype)
        if self.limits.max_context_tokens > network.config.max_position_embeddings:
            raise EngineLoadError(
                f"{self._model}: {self._path}: max_context_tokens is {self.limits.max_context_tokens}, "
                f"the weights hold {network.config.max_position_embeddings}"
            )
        end_ids = _end_ids(network, tokenizer)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0)
        self._loaded = _Loaded(network, tokenizer, PromptEncoder(tokenizer), end_ids, pad_id)
        [outcome] = self.run([_warm_up_item(tokenizer)])
        if isinstance(outcome, Failure):
            raise EngineLoadError(f"{self._model}: {self._path}: the first token failed: {outcome.message}")

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Answer every item, in order."""
        if self._loaded is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        prepared = [self._prepare(item, self._loaded.encoder) for item in batch]
        rows = [row for row in prepared if isinstance(row, _Row)]
        if rows:
            self._generate(rows, self._loaded)
        outcomes = [row.outcome if isinstance(row, _Row) else row for row in prepared]
        return [outcome for outcome in outcomes if outcome is not None]

    def close(self) -> None:
        """Let go of the weights."""
        self._loaded = None

    def _prepare(self, item: EngineItem, encoder: PromptEncoder) -> _Row | Failure:
        parameters = item.parameters
        if item.task != Task.GENERATE:
            return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")
        if parameters.max_tokens is not None and parameters.max_tokens < 1:
            return Failure(Code.INVALID, "must be at least 1", "parameters.max_tokens")
        try:
            prompt_ids = encoder.encode(item)
        except PromptError as error:
            return Failure(Code.INVALID, error.message, error.field)
        limit = self.limits.max_context_tokens
        wanted = min(parameters.max_tokens or 1, self.limits.max_output_tokens)
        if len(prompt_ids) + wanted > limit:
            return Failure(
                Code.CONTEXT_TOO_LONG,
                f"the prompt has {len(prompt_ids)} tokens and the answer needs {wanted}; "
                f"the context holds {limit} tokens",
                "input",
            )
        room = min(self.limits.max_output_tokens, limit - len(prompt_ids))
        stop = tuple(text for text in parameters.stop if text)
        return _Row(prompt_ids, min(parameters.max_tokens or room, room), stop, Sampler.of(parameters))

    def _generate(self, rows: list[_Row], loaded: _Loaded) -> None:
        """Run rows until each has its outcome."""
        ids, mask = _left_padded([row.prompt_ids for row in rows], loaded.pad_id)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=loaded.network.config)

        def decode(token_ids: list[int]) -> str:
            return str(loaded.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

        active = rows
        with torch.inference_mode():
            while True:
                logits = loaded.network(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                tokens = choose_tokens(logits.float(), [row.sampler for row in active])
                for row, token in zip(active, tokens, strict=True):
                    if row.outcome is None:
                        row.accept(token, loaded.end_ids, decode)
                unfinished = [index for index, row in enumerate(active) if row.outcome is None]
                if not unfinished:
                    return
                ids = torch.tensor([[loaded.pad_id if token is None else token] for token in tokens])
                positions = positions[:, -1:] + 1
                mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
                if len(unfinished) <= _COMPACT_AT * len(active):
                    kept = torch.tensor(unfinished)
                    cache.batch_select_indices(kept)
                    ids, positions, mask = ids[kept], positions[kept], mask[kept]
                    active = [active[index] for index in unfinished]


def _left_padded(prompts: list[list[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both int64 of shape (rows, longest prompt)."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _end_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = network.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in (*several, tokenizer.eos_token_id) if token_id is not None)


def _warm_up_item(tokenizer: PreTrainedTokenizerBase) -> EngineItem:
    given = (
        RequestInput(messages=(Message("user", "Hello"),)) if tokenizer.chat_template else RequestInput(prompt="Hello")
    )
    return EngineItem("warm-up", Task.GENERATE, given, Parameters(max_tokens=1))
