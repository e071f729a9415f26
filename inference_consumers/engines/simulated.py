"""An engine without a model, for load tests: it takes the time it is told and says so in every answer."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairlane.outcomes import Code, FinishReason, Task
from fairlane.records import LabelScore, Output, TokenUsage
from inference_consumers.engines.protocol import EngineItem, EngineLimits, Failure, ItemOutcome, Success

_WORDS = ("simulated", "answer", "without", "a", "model")
_DEFAULT_ANSWER_TOKENS = 16
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class SimulatedCost:
    """How long a batch takes: ``batch_ms`` whatever it holds, plus its tokens at the two rates."""

    prefill_tokens_per_s: float = math.inf
    decode_tokens_per_s: float = math.inf
    batch_ms: float = 0.0

    def seconds(self, prompt_tokens: int, completion_tokens: int) -> float:
        """The time of a batch with so many tokens in all."""
        return (
            self.batch_ms / 1000
            + prompt_tokens / self.prefill_tokens_per_s
            + completion_tokens / self.decode_tokens_per_s
        )


FREE = SimulatedCost()
"""No time at all: what is measured then is everything but the engine."""


class SimulatedEngine:
    """``simulated``: does every task. A token is four characters of the input and one word of the answer."""

    name = "simulated"

    def __init__(
        self,
        limits: EngineLimits,
        cost: SimulatedCost = FREE,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self._cost = cost
        self._sleep = sleep

    def load(self) -> None:
        """Nothing to load."""

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Answer every item, in order, after the batch's time has passed."""
        outcomes = [self._answer(item) for item in batch]
        usages = [outcome.usage for outcome in outcomes if isinstance(outcome, Success)]
        seconds = self._cost.seconds(
            sum(usage.prompt_tokens for usage in usages), sum(usage.completion_tokens for usage in usages)
        )
        if seconds > 0:
            self._sleep(seconds)
        return outcomes

    def close(self) -> None:
        """Nothing to let go of."""

    def _answer(self, item: EngineItem) -> ItemOutcome:
        given = item.input
        match item.task:
            case Task.GENERATE:
                return self._generate(item)
            case Task.EMBED if given.texts:
                return self._encoded(given.texts, Output(embeddings=((1.0, 0.0),) * len(given.texts)))
            case Task.RANK if given.query is not None and given.documents:
                texts = (given.query, *given.documents)
                return self._encoded(texts, Output(scores=(0.0,) * len(given.documents)))
            case Task.CLASSIFY if given.image:
                return Success(Output(labels=(LabelScore("simulated", 1.0),)), TokenUsage())
            case _:
                return Failure(Code.INVALID, f"nothing to {item.task}", "input")

    def _generate(self, item: EngineItem) -> ItemOutcome:
        given, parameters = item.input, item.parameters
        texts = [message.content for message in given.messages or ()]
        texts += [given.prompt] if given.prompt else []
        if not texts:
            return Failure(Code.INVALID, "neither messages nor a prompt", "input")
        if parameters.max_tokens is not None and parameters.max_tokens < 1:
            return Failure(Code.INVALID, "must be at least 1", "parameters.max_tokens")
        prompt_tokens = sum(map(_tokens, texts)) + sum(_tokens(passage.text) for passage in item.passages)
        answer_tokens = min(parameters.max_tokens or _DEFAULT_ANSWER_TOKENS, self.limits.max_output_tokens)
        if prompt_tokens + answer_tokens > self.limits.max_context_tokens:
            return self._too_long(prompt_tokens + answer_tokens, "input")
        text = " ".join(itertools.islice(itertools.cycle(_WORDS), answer_tokens))
        cuts = [cut for cut in (text.find(stop) for stop in parameters.stop if stop) if cut >= 0]
        if cuts:
            text = text[: min(cuts)]
            answer_tokens = min(answer_tokens, text.count(" ") + 1)
        usage = TokenUsage(prompt_tokens=prompt_tokens, completion_tokens=answer_tokens)
        return Success(Output(text=text), usage, FinishReason.STOP if cuts else FinishReason.LENGTH)

    def _encoded(self, texts: tuple[str, ...], output: Output) -> ItemOutcome:
        counts = [_tokens(text) for text in texts]
        if max(counts) > self.limits.max_context_tokens:
            return self._too_long(max(counts), "input")
        return Success(output, TokenUsage(prompt_tokens=sum(counts)))

    def _too_long(self, tokens: int, field: str) -> Failure:
        limit = self.limits.max_context_tokens
        return Failure(Code.CONTEXT_TOO_LONG, f"{tokens} tokens; the context holds {limit}", field)


def _tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / _CHARACTERS_PER_TOKEN))
