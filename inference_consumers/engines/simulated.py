"""Simulated engine for load tests, without a model; every answer says that it is simulated."""

import itertools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairlane.outcomes import Code, FinishReason, Task
from fairlane.records import LabelScore, Output, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineItem,
    EngineLimits,
    Failure,
    RunCost,
    RunObserver,
    SimulatedCost,
    Success,
    over_allowance,
)

_WORDS = ("simulated", "answer", "without", "a", "model")
_DEFAULT_ANSWER_TOKENS = 16
_CHARACTERS_PER_TOKEN = 4
_LENGTH_ASKED_FOR = re.compile(r" answer in +(\d+) tokens$")
_LONGEST_SLEEP_S = 0.05
# A sleep takes about a tenth of a millisecond more than it was asked for: shorter times are slept together.
_SHORTEST_SLEEP_S = 0.001


@dataclass(slots=True)
class _Row:
    """An item while it is answered; ``words`` are the parts of its text, one a step when it streams."""

    index: int
    answer: Success
    words: list[str]
    streams: bool


class SimulatedEngine:
    """``simulated``: does every task. A token is four characters of the input and one word of the answer. An answer has
    as many tokens as are allowed, or fewer when the prompt ends in `` answer in N tokens``: real clients allow more
    than they get.

    The batch's fixed time and its prompts come first, then a word of every item that is not done: the time is
    spread over them, so that texts come word by word and an item can be cancelled between two of them.
    """

    name = "simulated"

    def __init__(
        self,
        limits: EngineLimits,
        cost: SimulatedCost = SimulatedCost(),  # noqa: B008 - frozen
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``now`` is in seconds."""
        self.limits = limits
        self._cost = cost
        self._sleep = sleep
        self._now = now

    def load(self) -> None:
        """Nothing to load."""

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item in the time that the batch costs. No token is padding."""
        rows: list[_Row] = []
        for index, item in enumerate(batch):
            answer = self._if_it_fits(item, self._answer(item))
            if isinstance(answer, Failure):
                observer.finished(index, answer)
            elif observer.is_cancelled(index):
                observer.finished(index, CancelledItem(TokenUsage()))
            else:
                rows.append(_Row(index, answer, _parts(answer), item.parameters.stream))
        tokens = _SimulatedRun(rows, self._cost, observer, self._sleep, self._now).run() if rows else 0
        return RunCost(useful_tokens=tokens, computed_tokens=tokens)

    def close(self) -> None:
        """Nothing to let go of."""

    def _if_it_fits(self, item: EngineItem, outcome: Success | Failure) -> Success | Failure:
        if isinstance(outcome, Failure):
            return outcome
        tokens = outcome.usage.prompt_tokens
        if failure := over_allowance(item, tokens):
            return failure
        if 0 < self._cost.memory_tokens < tokens:
            return Failure(Code.OVERLOADED, f"{tokens} prompt tokens; there is memory for {self._cost.memory_tokens}")
        return outcome

    def _answer(self, item: EngineItem) -> Success | Failure:
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

    def _generate(self, item: EngineItem) -> Success | Failure:
        given, parameters = item.input, item.parameters
        texts = [message.content for message in given.messages or ()]
        texts += [given.prompt] if given.prompt else []
        if not texts:
            return Failure(Code.INVALID, "neither messages nor a prompt", "input")
        if parameters.max_tokens is not None and parameters.max_tokens < 1:
            return Failure(Code.INVALID, "must be at least 1", "parameters.max_tokens")
        texts += [message.content for message in item.history] + [passage.text for passage in item.passages]
        prompt_tokens = sum(map(_tokens, texts))
        allowed_tokens = min(parameters.max_tokens or _DEFAULT_ANSWER_TOKENS, self.limits.max_output_tokens)
        named = _LENGTH_ASKED_FOR.search(texts[-1])
        answer_tokens = allowed_tokens if named is None else max(1, min(int(named[1]), allowed_tokens))
        if prompt_tokens + answer_tokens > self.limits.max_context_tokens:
            return self._too_long(prompt_tokens + answer_tokens, "input")
        text = " ".join(itertools.islice(itertools.cycle(_WORDS), answer_tokens))
        cuts = [cut for cut in (text.find(stop) for stop in parameters.stop if stop) if cut >= 0]
        if cuts:
            text = text[: min(cuts)]
            answer_tokens = min(answer_tokens, text.count(" ") + 1)
        usage = TokenUsage(prompt_tokens=prompt_tokens, completion_tokens=answer_tokens)
        reason = FinishReason.STOP if cuts or answer_tokens < allowed_tokens else FinishReason.LENGTH
        answer = Success(Output(text=text), usage, reason)
        if parameters.logprobs is None:
            return answer
        top = parameters.logprobs > 0
        certain = tuple(
            TokenLogprob(part, 0.0, (TopLogprob(part, 0.0),) if top else ()) for part in _parts(answer) if part
        )
        return Success(Output(text=text, logprobs=certain), usage, answer.finish_reason)

    def _encoded(self, texts: tuple[str, ...], output: Output) -> Success | Failure:
        counts = [_tokens(text) for text in texts]
        if max(counts) > self.limits.max_context_tokens:
            return self._too_long(max(counts), "input")
        return Success(output, TokenUsage(prompt_tokens=sum(counts)))

    def _too_long(self, tokens: int, field: str) -> Failure:
        limit = self.limits.max_context_tokens
        return Failure(Code.CONTEXT_TOO_LONG, f"{tokens} tokens; the context holds {limit}", field)


@dataclass(slots=True)
class _SimulatedRun:
    """Waits for the time of a run and reports to its observer at least every 50 ms."""

    _rows: list[_Row]
    _cost: SimulatedCost
    _observer: RunObserver
    _sleep: Callable[[float], None]
    _now: Callable[[], float]
    _due: float = 0.0

    def run(self) -> int:
        """Report the outcomes as they come. Returns the computed tokens."""
        tokens = sum(row.answer.usage.prompt_tokens for row in self._rows)
        self._due = self._now()
        self._pass_time(self._cost.prefill_seconds(tokens), 0)
        self._finish(0)
        if math.isinf(self._cost.decode_tokens_per_s) and not any(row.streams for row in self._rows):
            completion_tokens = [row.answer.usage.completion_tokens for row in self._rows]
            self._finish(max(completion_tokens, default=0))
            return tokens + sum(completion_tokens)
        for place in itertools.count():
            if not self._rows:
                break
            self._pass_time(len(self._rows) / self._cost.decode_tokens_per_s, place)
            tokens += len(self._rows)
            self._tell(place)
            self._finish(place + 1)
        return tokens

    def _pass_time(self, seconds: float, written: int) -> None:
        """``written`` words of each row are known."""
        self._due += seconds
        last = any(row.answer.usage.completion_tokens <= written + 1 for row in self._rows)
        shortest = 0.0 if last else _SHORTEST_SLEEP_S
        self._drop_cancelled(written)
        # Measured against the clock, so that the next sleep makes up for one that took too long.
        while self._rows and (left := self._due - self._now()) > shortest:
            self._sleep(min(left, _LONGEST_SLEEP_S))
            self._observer.step()
            self._drop_cancelled(written)

    def _tell(self, place: int) -> None:
        words = [(row.index, row.words[place]) for row in self._rows if row.streams and row.words[place]]
        for index, word in words:
            self._observer.text(index, word)
        if words:
            self._observer.step()

    def _finish(self, written: int) -> None:
        done = [row for row in self._rows if row.answer.usage.completion_tokens <= written]
        self._rows = [row for row in self._rows if row.answer.usage.completion_tokens > written]
        for row in done:
            self._observer.finished(row.index, row.answer)
        if done:
            self._observer.step()

    def _drop_cancelled(self, written: int) -> None:
        kept = []
        for row in self._rows:
            if self._observer.is_cancelled(row.index):
                usage = TokenUsage(prompt_tokens=row.answer.usage.prompt_tokens, completion_tokens=written)
                self._observer.finished(row.index, CancelledItem(usage))
            else:
                kept.append(row)
        self._rows = kept


def _parts(answer: Success) -> list[str]:
    """The text in as many parts as it has tokens: words, each but the first with the space before it."""
    words = (answer.output.text or "").split(" ")
    return words[:1] + [f" {word}" for word in words[1:]]


def _tokens(text: str) -> int:
    return max(1, math.ceil(len(text) / _CHARACTERS_PER_TOKEN))
