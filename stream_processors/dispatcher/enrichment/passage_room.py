"""Selection of passages that fit into the prompt. Pure."""

from collections.abc import Sequence

from fairlane.outcomes import Task
from fairlane.records import InferenceRequest, ModelVersion
from fairlane_server.retrieval.store import Hit

_FRAME_TOKENS = 48
"""Tokens of the prompt template around all passages."""

_PASSAGE_FRAME_TOKENS = 12
"""Tokens of the prompt template around each passage."""

ESTIMATE_MARGIN = 1.25
"""Safety factor: token counts are estimates."""


def room_tokens(
    request: InferenceRequest, model: ModelVersion, prompt_tokens: int, max_prompt_tokens: int | None = None
) -> int | None:
    """Tokens left for passages besides the prompt: within the model's context, output included, and the tenant's prompt
    bound. None if neither has a limit; negative if nothing is left."""
    bounds = [] if max_prompt_tokens is None else [max_prompt_tokens]
    if model.max_context_tokens > 0:
        output = 0
        if request.task == Task.GENERATE:
            output = request.parameters.max_tokens or model.max_output_tokens
        bounds.append(model.max_context_tokens - output)
    return int(min(bounds) - prompt_tokens * ESTIMATE_MARGIN) - _FRAME_TOKENS if bounds else None


def shown_tokens(hit: Hit) -> int:
    """Upper estimate of a passage's tokens in a prompt: they were counted by another model's tokenizer."""
    return int(hit.tokens * ESTIMATE_MARGIN) + _PASSAGE_FRAME_TOKENS


def shown_text(hit: Hit) -> str:
    """The passage as shown in a prompt, below its headings, which often name its subject."""
    return f"{hit.heading}\n{hit.text}" if hit.heading else hit.text


def that_fit(hits: Sequence[Hit], room: int | None) -> tuple[Hit, ...]:
    """The best passages that fit together; one that is too long does not exclude a shorter, lower-ranked one."""
    if room is None:
        return tuple(hits)
    kept = []
    for hit in hits:
        needs = shown_tokens(hit)
        if needs <= room:
            kept.append(hit)
            room -= needs
    return tuple(kept)
