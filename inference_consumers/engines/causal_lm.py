"""Text generation with any causal language model that transformers loads.

One run answers a whole micro-batch: it is prefilled in parts and then decoded together, a token a step. Prompts are
aligned at their ends, so that all rows write the same column of the cache. Every row has its own length, stop strings,
sampling and randomness; one that is done leaves at once, and the last row takes its place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.records import TokenUsage
from inference_consumers.engines.generated_text import GeneratedAnswer, TokenNames
from inference_consumers.engines.kv_cache import BatchCache, use_grouped_attention
from inference_consumers.engines.pretrained import PretrainedEngine
from inference_consumers.engines.prompts import (
    PromptEncoder,
    has_broken_text,
    prepare_text,
    read_passages_template,
    warm_up_item,
)
from inference_consumers.engines.protocol import CancelledItem, EngineItem, Failure, RunCost, RunObserver, try_once
from inference_consumers.engines.sampling import Sampler, choose_tokens, logprobs_of

# What a key-value cache of one column per token can hold.
_CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

# Positions in one pass of a prefill. On the CPU more are not computed any faster each, and a step takes longer.
_CPU_PREFILL_TOKENS = 512
_GPU_PREFILL_TOKENS = 8192


@dataclass(slots=True, eq=False)
class _AnswerRow:
    """One item while it is generated. ``index`` is its place in the batch; ``sampler`` None is greedy."""

    index: int
    prompt_ids: list[int]
    sampler: Sampler | None
    top_logprobs: int | None
    answer: GeneratedAnswer
    is_streamed: bool = False
    prefilled: int = 0
    is_done: bool = False

    @property
    def usage(self) -> TokenUsage:
        return TokenUsage(prompt_tokens=self.prefilled, completion_tokens=self.answer.tokens)


class _Generation:
    """Runs at least one row until each is done, and reports to the observer."""

    def __init__(
        self, network: PreTrainedModel, rows: Sequence[_AnswerRow], pad_id: int, observer: RunObserver
    ) -> None:
        self._network = network
        self._observer = observer
        self._device: torch.device = network.device
        self._pad_id = pad_id
        # The longest first, so that the rows of a part of the prefill have similar lengths.
        self._all = sorted(rows, key=lambda row: -len(row.prompt_ids))
        self._slots = list(self._all)
        self._width = len(self._slots[0].prompt_ids)
        self._starts = [self._width - len(row.prompt_ids) for row in self._slots]
        most_columns = max(self._width + row.answer.max_tokens for row in rows)
        self._cache = BatchCache(len(self._slots), self._width, most_columns)
        starts = torch.tensor(self._starts, device=self._device)
        self._mask = (torch.arange(most_columns, device=self._device) >= starts[:, None]).long()
        self._computed = 0

    def run(self) -> RunCost:
        self._end_cancelled()
        with torch.inference_mode():
            self._prefill()
            self._decode()
        useful = sum(row.prefilled + row.answer.tokens for row in self._all)
        return RunCost(useful_tokens=useful, computed_tokens=self._computed)

    def _prefill(self) -> None:
        """A part is rows of similar length, or a piece of one long row: no step takes long, however large the batch."""
        budget = _GPU_PREFILL_TOKENS if self._device.type == "cuda" else _CPU_PREFILL_TOKENS
        for part in self._parts(budget):
            rows = self._slots[part]
            start = self._starts[part.start]
            for at in range(start, self._width, budget):
                if all(row.is_done for row in rows):
                    break
                end = min(at + budget, self._width)
                self._computed += len(rows) * (end - at)
                logits = self._pass(part, self._prompt_ids(part, at, end), start, at)
                for row, row_start in zip(rows, self._starts[part], strict=True):
                    row.prefilled = max(0, end - row_start) if not row.is_done else row.prefilled
                if end == self._width:
                    self._accept(rows, logits)
                self._observer.step()
                self._end_cancelled()

    def _parts(self, budget: int) -> Iterator[slice]:
        first = 0
        while first < len(self._slots):
            rows = max(1, budget // (self._width - self._starts[first]))
            yield slice(first, min(first + rows, len(self._slots)))
            first += rows

    def _prompt_ids(self, part: slice, at: int, end: int) -> torch.Tensor:
        """int64 of shape (rows, end - at): what of their prompts is in these columns, padded on the left."""
        ids = torch.full((part.stop - part.start, end - at), self._pad_id)
        for place, slot in enumerate(range(part.start, part.stop)):
            start = self._starts[slot]
            known = self._slots[slot].prompt_ids[max(0, at - start) : max(0, end - start)]
            if known:
                ids[place, -len(known) :] = torch.tensor(known)
        return ids

    def _decode(self) -> None:
        at = self._width
        while self._close_gaps(at):
            rows = self._slots
            ids = torch.tensor([[row.answer.last_token] for row in rows])
            self._accept(rows, self._pass(slice(0, len(rows)), ids, min(self._starts[: len(rows)]), at))
            at += 1
            self._observer.step()
            self._end_cancelled()

    def _pass(self, part: slice, ids: torch.Tensor, start: int, at: int) -> torch.Tensor:
        """The float32 logits, of shape (rows, vocabulary), behind the last of ``ids``, which go into columns from
        ``at`` on; columns before ``start`` are padding."""
        columns = ids.shape[1]
        self._cache.look_at(part, start, at, columns)
        starts = torch.tensor(self._starts[part], device=self._device)
        positions = torch.arange(at, at + columns, device=self._device) - starts[:, None]
        is_padded = any(row_start > start for row_start in self._starts[part])
        logits: torch.Tensor = self._network(
            input_ids=ids.to(self._device),
            # Without a mask attention is computed in a faster way.
            attention_mask=self._mask[part, start : at + columns] if is_padded else None,
            position_ids=positions.clamp(min=0),
            past_key_values=self._cache.for_network,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits.float()

    def _accept(self, rows: Sequence[_AnswerRow], logits: torch.Tensor) -> None:
        """Choose the next token of every row, and report the results."""
        self._computed += len(rows)
        tokens = choose_tokens(logits, [row.sampler for row in rows])
        logprobs = logprobs_of(logits, tokens, [None if row.is_done else row.top_logprobs for row in rows])
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row.is_done:
                continue
            text, outcome = row.answer.add(token, logprob, row.usage.prompt_tokens)
            if text and row.is_streamed:
                self._observer.text(row.index, text)
            if outcome is not None:
                row.is_done = True
                self._observer.finished(row.index, outcome)

    def _end_cancelled(self) -> None:
        for row in self._all:
            if not row.is_done and self._observer.is_cancelled(row.index):
                row.is_done = True
                self._observer.finished(row.index, CancelledItem(row.usage))

    def _close_gaps(self, at: int) -> int:
        """Move rows from the end to where rows are done; how many are left."""
        slot = 0
        while slot < len(self._slots):
            if not self._slots[slot].is_done:
                slot += 1
                continue
            last = self._slots.pop()
            start = self._starts.pop()
            if slot < len(self._slots):
                if not last.is_done:
                    self._cache.move(len(self._slots), slot, slice(start, at))
                    self._mask[slot] = self._mask[len(self._slots)]
                self._slots[slot], self._starts[slot] = last, start
        return len(self._slots)


@dataclass(frozen=True, slots=True)
class _Loaded:
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    names: TokenNames
    end_ids: frozenset[int]
    pad_id: int

    def decode(self, token_ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)


class CausalLmEngine(PretrainedEngine):
    """``torch-causal-lm``.

    Float32 is the default because it keeps a greedy answer independent of its neighbours in a batch, but for
    near-exact ties. In bfloat16 the two best tokens are often within rounding of each other, and the rounding
    depends on the shape of the batch. float32 was no slower on the CPU measured; bfloat16 halves the memory.
    """

    name = "torch-causal-lm"

    _loaded: _Loaded | None = None

    def load(self) -> None:
        network, tokenizer = self._load_folder(AutoModelForCausalLM)
        layers = set(getattr(network.config, "layer_types", None) or ())
        if not layers <= _CACHED_LAYERS:
            raise self._error(f"config.json names layers without keys and values: {sorted(layers)}")
        encoder = PromptEncoder(tokenizer, read_passages_template(self._spec))
        use_grouped_attention(network)
        configured = network.generation_config.eos_token_id
        several = configured if isinstance(configured, list) else [configured]
        end_ids = frozenset(token for token in (*several, tokenizer.eos_token_id) if token is not None)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0)
        self._loaded = _Loaded(network, tokenizer, encoder, TokenNames(tokenizer), end_ids, pad_id)
        try_once(self, [warm_up_item(tokenizer)], self._spec)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is a part of the prefill, or a token of every item that is not done."""
        if self._loaded is None:
            raise self._spec.error("not loaded")
        rows = []
        for index, item in enumerate(batch):
            row = self._row(index, item, self._loaded)
            if isinstance(row, _AnswerRow):
                rows.append(row)
            else:
                observer.finished(index, row)
        if len(rows) < len(batch):
            observer.step()
        if not rows:
            return RunCost()
        return _Generation(self._loaded.network, rows, self._loaded.pad_id, observer).run()

    def close(self) -> None:
        self._loaded = None

    def _row(self, index: int, item: EngineItem, loaded: _Loaded) -> _AnswerRow | Failure:
        prompt = prepare_text(item, loaded.encoder, self.limits)
        if isinstance(prompt, Failure):
            return prompt
        answer = GeneratedAnswer(
            loaded.decode,
            loaded.names,
            loaded.end_ids,
            max_tokens=prompt.max_tokens,
            stop=prompt.stop,
            may_be_broken=partial(has_broken_text, item),
        )
        parameters = item.parameters
        return _AnswerRow(
            index, prompt.token_ids, Sampler.of(parameters), parameters.logprobs, answer, parameters.stream
        )
