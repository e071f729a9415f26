"""Checks of a text generating engine before it accepts an item."""

import math
from dataclasses import dataclass

from fairlane.outcomes import Code, Task
from fairlane.records import Parameters
from inference_consumers.engines.prompts import PromptEncoder, PromptError
from inference_consumers.engines.protocol import EngineItem, EngineLimits, Failure


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """An item that can be answered: its prompt, and how many tokens the answer may have at most."""

    token_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]


def prepare_text(item: EngineItem, encoder: PromptEncoder, limits: EngineLimits) -> TextPrompt | Failure:
    """The item's prompt, or why it gets no answer."""
    parameters = item.parameters
    if item.task != Task.GENERATE:
        return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")
    if wrong := _wrong_parameters(parameters):
        return wrong
    try:
        token_ids = encoder.encode(item)
    except PromptError as error:
        return Failure(Code.INVALID, error.message, error.field)
    if item.max_prompt_tokens is not None and len(token_ids) > item.max_prompt_tokens:
        message = f"the prompt has {len(token_ids)} tokens; the tenant's limit is {item.max_prompt_tokens}"
        return Failure(Code.CONTEXT_TOO_LONG, message, "input")
    limit = limits.max_context_tokens
    wanted = min(parameters.max_tokens or 1, limits.max_output_tokens)
    if len(token_ids) + wanted > limit:
        return Failure(
            Code.CONTEXT_TOO_LONG,
            f"the prompt has {len(token_ids)} tokens and the answer needs {wanted}; the context holds {limit} tokens",
            "input",
        )
    room = min(limits.max_output_tokens, limit - len(token_ids))
    stop = tuple(text for text in parameters.stop if text)
    return TextPrompt(token_ids, min(parameters.max_tokens or room, room), stop)


def _wrong_parameters(parameters: Parameters) -> Failure | None:
    """What an engine would fail on with its whole batch, or answer with nonsense. Dispatchers refuse more than this."""
    if parameters.max_tokens is not None and parameters.max_tokens < 1:
        return Failure(Code.INVALID, "must be at least 1", "parameters.max_tokens")
    if not 0 <= parameters.temperature < math.inf:
        return Failure(Code.INVALID, "must be a number from 0", "parameters.temperature")
    if not 0 < parameters.top_p <= 1:
        return Failure(Code.INVALID, "must be above 0 and at most 1", "parameters.top_p")
    if parameters.logprobs is not None and parameters.logprobs < 0:
        return Failure(Code.INVALID, "must be at least 0", "parameters.logprobs")
    return None
