"""What is done to an answer after its checks: de-duplication, trimming, and JSON repaired or refused.

No message quotes the answer: a format error names the keyword of the schema that is not met, and nothing of the text.
"""

import json
import re
from functools import lru_cache
from typing import Any

from fairlane.frozen import frozen_dataclass
from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.repetition import RepetitionCheck

MOST_REPAIRED_CHARACTERS = 8_000
"""Of JSON that is broken; longer is refused, because the time of the repair is quadratic in some texts (1 s here)."""
_LEAST_DEDUPLICATED = 20
"""Characters of a line or sentence that may not come twice in a row; shorter ones do on purpose ("No. No.")."""
_TRAILING_SPACE = re.compile(r"[ \t]+$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n{4,}")
_SENTENCE = re.compile(r"[^.!?\n]*(?:[.!?]+[ \t]*|\n+|$)")
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?```", re.DOTALL | re.IGNORECASE)


class FormatError(ValueError):
    """The answer is not in the format that was asked for, and cannot be repaired to be."""


@frozen_dataclass(frozen=True, slots=True)
class PostProcessing:
    """What is done; the order is that of the fields."""

    deduplicate: bool = False
    trim: bool = False
    json_schema: str = ""
    """A JSON Schema as text, which has passed ``check_schema``; empty: the answer is not JSON."""


def post_processed(text: str, rules: PostProcessing) -> str:
    """The answer as it is delivered. Raises FormatError when it does not satisfy the schema."""
    if rules.deduplicate:
        text = deduplicated(text)
    if rules.trim:
        text = trimmed(text)
    if rules.json_schema:
        text = conforming_json(text, rules.json_schema)
    return text


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
    try:
        _check(json.loads(text, parse_constant=_no_constant), schema)
    except (ValueError, RecursionError):
        return _repaired(text, schema)
    return text


def check_schema(schema: str) -> None:
    """Raises ValueError, with the reason, for a text that is no JSON Schema that can be used: one of a draft from 4 to
    2020-12, without references to other documents, and with patterns that take linear time."""
    try:
        _validator(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


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
    except ValueError:
        raise FormatError("a number that JSON does not have") from None


def _check(value: Any, schema: str) -> None:
    """Raises FormatError."""
    error = next(iter(_validator(schema).iter_errors(value)), None)
    if error is not None:
        raise FormatError(f"the schema's {'/'.join(map(str, error.schema_path))} is not satisfied")


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    import jsonschema_rs

    parsed = json.loads(schema)
    if not isinstance(parsed, dict):
        raise ValueError("a JSON Schema is an object")  # noqa: TRY004 - a wrong value of a setting
    try:
        return jsonschema_rs.validator_for(parsed, offline=True, pattern_options=jsonschema_rs.RegexOptions())
    except jsonschema_rs.ValidationError as error:
        raise ValueError(f"not a JSON Schema that can be used: {error.message}") from None


def _no_constant(name: str) -> float:
    raise FormatError(f"{name} is not JSON")
