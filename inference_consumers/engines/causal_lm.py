"""Text generation with any causal language model that transformers loads.

One run answers a whole micro-batch. Every row has its own length, stop strings, sampling and randomness, and leaves
when it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from inference_consumers.engines.generated_text import Answer, TokenNames
from inference_consumers.engines.generation import Generation, Row
from inference_consumers.engines.kv_cache import use_grouped_attention
from inference_consumers.engines.pretrained import PretrainedEngine
from inference_consumers.engines.prompts import (
    PromptEncoder,
    has_broken_text,
    prepare_text,
    read_passages_template,
    warm_up_item,
)
from inference_consumers.engines.protocol import EngineItem, EngineLoadError, Failure, RunCost, RunObserver, try_once
from inference_consumers.engines.sampling import Sampler

# What a key-value cache of one column per token can hold.
_CACHED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


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
    """``torch-causal-lm``: a transformers folder on one device.

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
            raise self._load_error(f"config.json names layers without keys and values: {sorted(layers)}")
        encoder = PromptEncoder(tokenizer, read_passages_template(self._model, self._path))
        use_grouped_attention(network)
        end_ids = _end_ids(network, tokenizer)
        pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(end_ids, default=0)
        self._loaded = _Loaded(network, tokenizer, encoder, TokenNames(tokenizer), end_ids, pad_id)
        try_once(self, [warm_up_item(tokenizer)], f"{self._model}: {self._path}")

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


def _end_ids(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = network.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in (*several, tokenizer.eos_token_id) if token_id is not None)
