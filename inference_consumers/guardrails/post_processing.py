"""What is done to an answer after its checks: de-duplication, trimming, and JSON repaired or refused.

No message quotes the answer: a format error names the keyword of the schema that is not met, and nothing of the text.
"""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from fairlane.guardrail_records import PostProcessing
from fairlane.outcomes import GuardrailCheck
from fairlane_server.json_schemas import unmet
from inference_consumers.guardrails.check import CheckContext, Processed
from inference_consumers.guardrails.repetition import RepetitionCheck

MOST_REPAIRED_CHARACTERS = 8_000
"""Of JSON that is broken; longer is refused, because the time of the repair is quadratic in some texts (1 s here)."""
_LEAST_DEDUPLICATED = 20
"""Characters of a line or sentence that may not come twice in a row; shorter ones do on purpose ("No. No.")."""
_TRAILING_SPACE = re.compile(r"(?<![ \t])[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
_SENTENCE = re.compile(r"[^.!?\n]*(?:[.!?]+[ \t]*|\n+|$)")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


class Step(StrEnum):
    """What changed an answer, as in its verdict."""

    DEDUPLICATED = "deduplicated"
    TRIMMED = "trimmed"
    JSON_REPAIRED = "json_repaired"


class FormatError(ValueError):
    """The answer is not in the format that was asked for, and cannot be repaired to be."""


class PostProcessor:
    """Serves the process of post-processing. Raises ImportError at the start if a package is missing."""

    name: str = GuardrailCheck.POST_PROCESSING

    def __init__(self) -> None:
        import json_repair
        import jsonschema_rs

        del json_repair, jsonschema_rs

    def process(self, texts: Sequence[str], context: CheckContext) -> list[Processed]:
        """The answers as they are delivered."""
        wanted = context.post_processing or PostProcessing()
        return [_processed(text, wanted) for text in texts]


def post_processed(text: str, wanted: PostProcessing) -> Processed:
    """The answer as it is delivered. Raises FormatError when it does not satisfy the schema.

    JSON that satisfies it is not de-duplicated: equal lines of it are data.
    """
    steps: list[Step] = []
    if wanted.deduplicate and not (wanted.json_schema and _is_conforming(text, wanted.json_schema)):
        text = _counted(Step.DEDUPLICATED, text, deduplicated(text), steps)
    if wanted.trim:
        text = _counted(Step.TRIMMED, text, trimmed(text), steps)
    if wanted.json_schema:
        text = _counted(Step.JSON_REPAIRED, text, conforming_json(text, wanted.json_schema), steps)
    return Processed(text, tuple(steps), is_put_together=any(step is not Step.TRIMMED for step in steps))


def deduplicated(text: str) -> str:
    """Without loops (as the check ``repetition`` finds them), sentences and lines that equal the one before."""
    [loops] = RepetitionCheck().find([text], CheckContext())
    for loop in reversed(loops):
        text = text[: loop.start] + text[loop.end :]
    kept: list[str] = []
    for match in _SENTENCE.finditer(text):
        sentence = match[0].strip()
        if len(sentence) < _LEAST_DEDUPLICATED or not kept or sentence != kept[-1].strip():
            kept.append(match[0])
    return "".join(kept)


def trimmed(text: str) -> str:
    """Without white space around it and at the ends of lines, and with at most two blank lines together."""
    return _BLANK_LINES.sub("\n\n\n", _TRAILING_SPACE.sub("", text)).strip()


def conforming_json(text: str, schema: str) -> str:
    """The text itself if it is JSON that satisfies the schema, or else its repaired form, if that does.

    Repaired are a fence or prose around it, quotes, commas, comments, and ends that are missing.
    """
    return text if _is_conforming(text, schema) else _repaired(text, schema)


def _processed(text: str, wanted: PostProcessing) -> Processed:
    try:
        return post_processed(text, wanted)
    except FormatError as error:
        return Processed(refusal=str(error))


def _counted(step: Step, before: str, after: str, steps: list[Step]) -> str:
    if after != before:
        steps.append(step)
    return after


def _is_conforming(text: str, schema: str) -> bool:
    try:
        _check(json.loads(text, parse_constant=_no_constant), schema)
    except (ValueError, RecursionError):
        return False
    return True


def _repaired(text: str, schema: str) -> str:
    import json_repair

    if len(text) > MOST_REPAIRED_CHARACTERS:
        raise FormatError("not the JSON that was asked for, and too long to be repaired")
    fenced = _FENCED.search(text)
    try:
        value = json_repair.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        raise FormatError("not JSON") from None
    # What is found in prose without any JSON.
    if value == "":
        raise FormatError("not JSON")
    _check(value, schema)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise FormatError("a number that JSON does not have, or nested too deeply") from None


def _check(value: Any, schema: str) -> None:
    """Raises FormatError."""
    try:
        place = unmet(value, schema)
    except ValueError as error:
        raise FormatError(str(error)) from None
    if place is not None:
        raise FormatError(f"the schema's {place} is not satisfied")


def _no_constant(name: str) -> float:
    raise FormatError(f"{name} is not JSON")
