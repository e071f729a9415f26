"""Text generation with any causal language model that transformers loads.

One run answers a whole micro-batch. Every row has its own length, stop strings, sampling and randomness, and leaves
when it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Task
from fairlane.records import Message, Parameters, RequestInput
from inference_consumers.engines.generated_text import Answer, TokenNames
from inference_consumers.engines.generation import Generation, Row
from inference_consumers.engines.kv_cache import use_grouped_attention
from inference_consumers.engines.pretrained import load_pretrained
from inference_consumers.engines.prompts import PromptEncoder, has_broken_text, prepare_text, read_passages_template
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    RunCost,
    RunObserver,
    run_batch,
)
from inference_consumers.engines.sampling import Sampler
from inference_consumers.engines.threads import use_threads

# What a key-value cache of one column per token can hold.
_CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_WARM_UP_TOKENS = 4


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


class CausalLmEngine:
    """``torch-causal-lm``: a transformers folder on one device.

    Float32 is the default because it keeps a greedy answer independent of its neighbours in a batch, but for
    near-exact ties. In bfloat16 the two best tokens are often within rounding of each other, and the rounding
    depends on the shape of the batch. float32 was no slower on the CPU measured; bfloat16 halves the memory.
    """

    name = "torch-causal-lm"

    def __init__(
        self,
        model: str,
        path: Path,
        limits: EngineLimits,
        threads: int,
        *,
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
        device: torch.device | str = "cpu",
        allow_unsafe_weights: bool = False,
    ) -> None:
        """``int8`` is for the weights of linear layers; what is between them is of type ``dtype``.
        ``allow_unsafe_weights`` loads pickles."""
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._dtype = dtype
        self._int8 = int8
        self._device = torch.device(device)
        self._allow_unsafe_weights = allow_unsafe_weights
        self._loaded: _Loaded | None = None

    def load(self) -> None:
        use_threads(self._threads)
        network, tokenizer = load_pretrained(
            AutoModelForCausalLM,
            self._model,
            self._path,
            self._dtype,
            int8=self._int8,
            device=self._device,
            allow_unsafe_weights=self._allow_unsafe_weights,
        )
        self._check(network)
        encoder = PromptEncoder(tokenizer, read_passages_template(self._model, self._path))
        use_grouped_attention(network)
        end_ids = _end_ids(network, tokenizer)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0)
        self._loaded = _Loaded(network, tokenizer, encoder, TokenNames(tokenizer), end_ids, pad_id)
        try:
            [outcome] = run_batch(self, [_warm_up_item(tokenizer)])
        except Exception as error:
            # Weights that load may still be of a kind of model that is run in another way.
            self._loaded = None
            raise self._load_error(f"the first token failed: {type(error).__name__}: {error}") from error
        if isinstance(outcome, Failure):
            self._loaded = None
            raise self._load_error(f"the first token failed: {outcome.message}")

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is a part of the prefill, or a token of every item that is not done."""
        if self._loaded is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        rows = []
        for index, item in enumerate(batch):
            row = self._row(index, item, self._loaded)
            if isinstance(row, Row):
                rows.append(row)
            else:
                observer.finished(index, row)
        if len(rows) < len(batch):
            observer.step()
        if not rows:
            return RunCost()
        return Generation(self._loaded.network, rows, self._loaded.pad_id, observer).run()

    def close(self) -> None:
        self._loaded = None

    def _row(self, index: int, item: EngineItem, loaded: _Loaded) -> Row | Failure:
        prompt = prepare_text(item, loaded.encoder, self.limits)
        if isinstance(prompt, Failure):
            return prompt
        answer = Answer(
            loaded.decode,
            loaded.names,
            loaded.end_ids,
            max_tokens=prompt.max_tokens,
            stop=prompt.stop,
            may_be_broken=partial(has_broken_text, item),
        )
        parameters = item.parameters
        return Row(index, prompt.token_ids, Sampler.of(parameters), parameters.logprobs, answer, parameters.stream)

    def _check(self, network: PreTrainedModel) -> None:
        held = getattr(network.config, "max_position_embeddings", None)
        if held is not None and self.limits.max_context_tokens > held:
            raise self._load_error(f"max_context_tokens is {self.limits.max_context_tokens}, the weights hold {held}")
        layers = set(getattr(network.config, "layer_types", None) or ())
        if not layers <= _CACHED_LAYERS:
            raise self._load_error(f"config.json names layers without keys and values: {sorted(layers)}")

    def _load_error(self, reason: str) -> EngineLoadError:
        return EngineLoadError(f"{self._model}: {self._path}: {reason}")


def _end_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = network.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in (*several, tokenizer.eos_token_id) if token_id is not None)


def _warm_up_item(tokenizer: PreTrainedTokenizerBase) -> EngineItem:
    given = (
        RequestInput(messages=(Message("user", "Hello"),)) if tokenizer.chat_template else RequestInput(prompt="Hello")
    )
    return EngineItem("warm-up", Task.GENERATE, given, Parameters(max_tokens=_WARM_UP_TOKENS))
