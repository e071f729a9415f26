"""Rules of a guardrail policy: what it may ask for, and its digest for cache keys. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from hashlib import blake2b

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.outcomes import GuardrailAction, GuardrailCheck, GuardrailFailure, GuardrailStage
from fairlane_server.json_schemas import check_schema
from fairlane_server.re2_patterns import check_pattern

CHECKS: Mapping[GuardrailStage, Sequence[GuardrailCheck]] = {
    GuardrailStage.INPUT: (
        GuardrailCheck.PII,
        GuardrailCheck.SECRETS,
        GuardrailCheck.PATTERNS,
        GuardrailCheck.PROMPT_INJECTION,
    ),
    GuardrailStage.OUTPUT: (
        GuardrailCheck.PII,
        GuardrailCheck.SECRETS,
        GuardrailCheck.PATTERNS,
        GuardrailCheck.TOXICITY,
        GuardrailCheck.LEAKED_PROMPT,
        GuardrailCheck.REPETITION,
    ),
}
"""Checks of each stage."""

REDACTING = frozenset({GuardrailCheck.PII, GuardrailCheck.SECRETS, GuardrailCheck.PATTERNS})
"""Checks that find a part of a text; the others judge it as a whole, and leave nothing to redact."""

MOST_PATTERNS = 64
MOST_PATTERN_CHARACTERS = 500
MOST_DENIED_WORDS = 500
MOST_DENIED_WORD_CHARACTERS = 100
MOST_CHARACTERS = 16_384
"""Patterns and denied words together: every work item carries them."""
MOST_SCHEMA_CHARACTERS = 8_192
"""Of a JSON Schema, as compact JSON."""

_DIGEST_BYTES = 16

Place = tuple[str | int, ...]
"""Path to a value of a policy: ``("input", 0, "action")``."""


class PolicyError(ValueError):
    """An invalid policy. ``place`` is the path to the value at fault, ``reason`` the message without it."""

    def __init__(self, place: Place, reason: str) -> None:
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
        super().__init__(f"guardrails{path}: {reason}")
        self.place = place
        self.reason = reason


def default_failure(action: str) -> GuardrailFailure:
    """What a failed check means where the policy does not say: a request that would be changed or refused is refused,
    one that would only be noted goes on."""
    return GuardrailFailure.OPEN if action in (GuardrailAction.LOG, GuardrailAction.OFF) else GuardrailFailure.CLOSED


def default_processing_failure(json_schema: str | None) -> GuardrailFailure:
    """As ``default_failure``, of post-processing: a format is a promise to the program that reads the answer."""
    return GuardrailFailure.OPEN if json_schema is None else GuardrailFailure.CLOSED


def check_policy(policy: GuardrailPolicy) -> None:
    """Raises PolicyError for anything that the consumers could not carry out."""
    for stage in GuardrailStage:
        _check_rules(stage, policy.input if stage is GuardrailStage.INPUT else policy.output)
    _check_texts("patterns", policy.patterns, MOST_PATTERNS, MOST_PATTERN_CHARACTERS)
    _check_texts("denied_words", policy.denied_words, MOST_DENIED_WORDS, MOST_DENIED_WORD_CHARACTERS)
    if sum(map(len, (*policy.patterns, *policy.denied_words))) > MOST_CHARACTERS:
        raise PolicyError(("patterns",), f"with the denied words more than {MOST_CHARACTERS} characters")
    for index, pattern in enumerate(policy.patterns):
        _check_pattern(("patterns", index), pattern)
    named = [rule for rule in (*policy.input, *policy.output) if rule.check == GuardrailCheck.PATTERNS]
    has_texts = bool(policy.patterns or policy.denied_words)
    if named and not has_texts:
        raise PolicyError((), "the check patterns needs patterns or denied_words")
    if has_texts and not named:
        field = "patterns" if policy.patterns else "denied_words"
        raise PolicyError((field,), "no rule of input or output has the check patterns")
    if policy.post_processing is not None:
        _check_post_processing(policy.post_processing)


def active_policy(policy: GuardrailPolicy | None) -> GuardrailPolicy | None:
    """The policy without the rules that are off; None if that leaves nothing to do."""
    if policy is None:
        return None
    before, after = (
        tuple(rule for rule in rules if rule.action != GuardrailAction.OFF) for rules in (policy.input, policy.output)
    )
    does_nothing = not before and not after and policy.post_processing is None
    return None if does_nothing else replace(policy, input=before, output=after)


@lru_cache(1_024)
def policy_digest(policy: GuardrailPolicy) -> bytes:
    """Digest of everything in the policy: an answer given under one policy is never given under another."""
    text = json.dumps(asdict(policy))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=b"fairlane-guards").digest()


def _check_rules(stage: GuardrailStage, rules: Sequence[GuardrailRule]) -> None:
    seen: set[str] = set()
    for index, rule in enumerate(rules):
        known = CHECKS[stage]
        if rule.check not in known:
            raise PolicyError((stage, index, "check"), f"unknown check {rule.check!r}; known: {', '.join(known)}")
        if rule.check in seen:
            raise PolicyError((stage, index, "check"), f"{rule.check!r} appears twice")
        seen.add(rule.check)
        for field, kind, value in (
            ("action", GuardrailAction, rule.action),
            ("on_failure", GuardrailFailure, rule.on_failure),
        ):
            if value not in tuple(kind):
                raise PolicyError((stage, index, field), f"unknown {field} {value!r}; known: {', '.join(kind)}")
        if rule.action == GuardrailAction.REDACT and rule.check not in REDACTING:
            can = ", ".join(sorted(REDACTING))
            raise PolicyError(
                (stage, index, "action"), f"{rule.check!r} finds nothing to redact; these checks do: {can}"
            )


def _check_post_processing(wanted: PostProcessing) -> None:
    if not (wanted.deduplicate or wanted.trim or wanted.json_schema is not None):
        raise PolicyError(("post_processing",), "asks for nothing; possible: deduplicate, trim, json_schema")
    if wanted.on_failure not in tuple(GuardrailFailure):
        known = ", ".join(GuardrailFailure)
        raise PolicyError(
            ("post_processing", "on_failure"), f"unknown on_failure {wanted.on_failure!r}; known: {known}"
        )
    if wanted.json_schema is None:
        return
    place: Place = ("post_processing", "json_schema")
    if len(wanted.json_schema) > MOST_SCHEMA_CHARACTERS:
        raise PolicyError(place, f"at most {MOST_SCHEMA_CHARACTERS} characters, not {len(wanted.json_schema)}")
    try:
        check_schema(wanted.json_schema)
    except ImportError:
        raise PolicyError(place, "a schema needs the package jsonschema-rs") from None
    except ValueError as error:
        raise PolicyError(place, " ".join(str(error).split())) from None


def _check_texts(field: str, texts: Sequence[str], most: int, most_characters: int) -> None:
    if len(texts) > most:
        raise PolicyError((field,), f"at most {most} are possible, not {len(texts)}")
    for index, text in enumerate(texts):
        if not 0 < len(text.strip()) <= len(text) <= most_characters:
            raise PolicyError((field, index), f"must have 1 to {most_characters} characters, and not only spaces")


def _check_pattern(place: Place, pattern: str) -> None:
    try:
        check_pattern(pattern)
    except ImportError:
        raise PolicyError(place, "patterns need the package google-re2") from None
    except ValueError as error:
        raise PolicyError(place, str(error)) from None
