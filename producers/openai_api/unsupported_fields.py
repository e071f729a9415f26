"""OpenAI fields that Fairlane does not implement, with the values it accepts. Pure data."""

from collections.abc import Mapping, Sequence
from typing import Any

from producers.openai_api.error_bodies import UNKNOWN_PARAMETER, UNSUPPORTED_PARAMETER
from producers.openai_api.gateway_error import GatewayError

AcceptedValues = Mapping[str, Sequence[object] | None]
"""Accepted values by field, those that change nothing; None: any value."""

_SAMPLING: AcceptedValues = {
    "n": (1, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "logit_bias": ({}, None),
}

CHAT: AcceptedValues = {
    **_SAMPLING,
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "parallel_tool_calls": None,
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "web_search_options": (None,),
}

MESSAGE: AcceptedValues = {
    "name": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": ([], None),
    "function_call": (None,),
    "tool_calls": ([], None),
}
"""Includes the fields that an assistant message of an earlier answer carries."""

COMPLETION: AcceptedValues = {
    **_SAMPLING,
    "user": None,
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
}

EMBEDDING: AcceptedValues = {"user": None}


def refuse_unsupported(extra: Mapping[str, Any] | None, neutral: AcceptedValues, within: str = "") -> None:
    """Reject fields that would be expected to change the answer and cannot.

    Args:
        extra: fields of a body that its model does not have.
        neutral: accepted fields and values.
        within: path of the fields, with a trailing dot.

    Raises:
        GatewayError: 400, naming the first such field.
    """
    for name, value in (extra or {}).items():
        if name not in neutral:
            shown = within + name if _is_field(name) else within.rstrip(".") or None
            raise GatewayError(400, UNKNOWN_PARAMETER, "this field is not known", field=shown)
        allowed = neutral[name]
        if allowed is not None and not any(value == one and type(value) is type(one) for one in allowed):
            reason = "only 1 is supported" if name in ("n", "best_of") else "is not supported"
            raise GatewayError(400, UNSUPPORTED_PARAMETER, f"{name}: {reason}", field=within + name)


def described(neutral: AcceptedValues) -> dict[str, Any]:
    """JSON schema properties of these fields."""
    return {
        name: {"description": "Taken, and changes nothing."} if allowed is None else {"enum": _distinct(allowed)}
        for name, allowed in neutral.items()
    }


def _distinct(values: Sequence[object]) -> list[object]:
    # 0 and 0.0 are the same JSON value.
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _is_field(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.isidentifier()
