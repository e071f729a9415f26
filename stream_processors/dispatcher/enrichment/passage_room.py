"""Which passages fit into the prompt. Pure."""

from collections.abc import Sequence

from fairlane.outcomes import Task
from fairlane.records import InferenceRequest, ModelVersion
from fairlane_server.retrieval.store import Hit

_FRAME_TOKENS = 48
"""What a prompt template puts around all passages."""

_PASSAGE_FRAME_TOKENS = 12
"""And around each."""

ESTIMATE_MARGIN = 1.25
"""Tokens are an estimate."""


def room_tokens(
    request: InferenceRequest, model: ModelVersion, prompt_tokens: int, max_prompt_tokens: int | None = None
) -> int | None:
    """Tokens that are left for passages beside the prompt: in the model's context, the answer counted, and within what
    the tenant's prompts may have. None where neither has a limit; below 0 where nothing is left."""
    bounds = [] if max_prompt_tokens is None else [max_prompt_tokens]
    if model.max_context_tokens > 0:
        output = 0
        if request.task == Task.GENERATE:
            output = request.parameters.max_tokens or model.max_output_tokens
        bounds.append(model.max_context_tokens - output)
    return int(min(bounds) - prompt_tokens * ESTIMATE_MARGIN) - _FRAME_TOKENS if bounds else None


def shown_tokens(hit: Hit) -> int:
    """What a passage takes in a prompt, at most: it was counted by another model's tokenizer."""
    return int(hit.tokens * ESTIMATE_MARGIN) + _PASSAGE_FRAME_TOKENS


def shown_text(hit: Hit) -> str:
    """A passage as a prompt shows it: under its headings, which often say what it is about."""
    return f"{hit.heading}\n{hit.text}" if hit.heading else hit.text


def that_fit(hits: Sequence[Hit], room: int | None) -> tuple[Hit, ...]:
    """The best passages that fit together; one that is too long does not keep a shorter, worse one out."""
    if room is None:
        return tuple(hits)
    kept = []
    for hit in hits:
        needs = shown_tokens(hit)
        if needs <= room:
            kept.append(hit)
            room -= needs
    return tuple(kept)
