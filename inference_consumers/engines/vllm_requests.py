"""One item in a running vLLM batch, from its first token to its outcome."""

import itertools
from dataclasses import dataclass, field
from functools import partial

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Output, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engines.answer import TokenNames
from inference_consumers.engines.generated_text import fault_of
from inference_consumers.engines.prompts import has_broken_text
from inference_consumers.engines.protocol import Cancelled, EngineItem, Failure, ItemOutcome, RunObserver, Success
from inference_consumers.engines.text_prompts import TextPrompt
from inference_consumers.engines.vllm_client import Position, Progress


@dataclass(eq=False, slots=True)
class JoinedRun:
    """A batch that joined, and its items without an outcome."""

    observer: RunObserver
    running: "set[TextRequest]" = field(default_factory=set)


@dataclass(eq=False, slots=True)
class TextRequest:
    """One item while it waits or runs. ``request_id`` is vLLM's name of it."""

    request_id: str
    index: int
    item: EngineItem
    prompt: TextPrompt
    run: JoinedRun
    is_added: bool = False
    is_cancelled: bool = False
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    positions: list[Position] = field(default_factory=list)

    def take(self, progress: Progress) -> None:
        """Add what came."""
        self.completion_tokens += len(progress.token_ids)
        self.cached_tokens = max(self.cached_tokens, progress.cached_tokens)
        self.texts.append(progress.text)
        self.positions += progress.positions

    def outcome(self, last: Progress, names: TokenNames) -> ItemOutcome:
        """After everything that came was taken, and ``last`` was the last of it."""
        # The end token and the tokens of a stop string count: each was a step that somebody paid for.
        usage = TokenUsage(len(self.prompt.token_ids), self.completion_tokens, self.cached_tokens)
        match last.finish_reason:
            case "abort":
                return Cancelled(usage)
            case "length":
                reason = FinishReason.LENGTH
            case "stop":
                reason = FinishReason.STOP
            case other:
                return Failure(Code.ENGINE_ERROR, f"the engine gave up: {other}")
        text = "".join(self.texts)
        fault = fault_of(
            text,
            self.completion_tokens,
            reason,
            may_be_empty=last.is_stopped_by_text,
            may_be_broken=partial(has_broken_text, self.item),
        )
        if fault is not None:
            return Failure(Code.ENGINE_ERROR, fault)
        return Success(Output(text=text, logprobs=self._logprobs(len(text), last, names)), usage, reason)

    def _logprobs(self, text_length: int, last: Progress, names: TokenNames) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens that wrote some of the text, or None where they were not asked for."""
        if self.item.parameters.logprobs is None:
            return None
        positions = self.positions
        if last.is_stopped_by_text:
            starts = itertools.accumulate((len(names.of(position.token_id)) for position in positions), initial=0)
            positions = [position for position, start in zip(positions, starts, strict=False) if start < text_length]
        elif last.finish_reason == "stop":
            positions = positions[:-1]
        return tuple(
            TokenLogprob(
                names.of(position.token_id),
                position.logprob,
                tuple(TopLogprob(names.of(token_id), logprob) for token_id, logprob in position.likeliest),
            )
            for position in positions
        )
