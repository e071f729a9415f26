"""Body of a chat completion for a call. Pure, standard library only, for Locust."""

from typing import Any

from producers.replay.plan import Call, text_of

PATH = "/v1/chat/completions"


def chat_body(call: Call, model: str, timeout_s: float, *, stream: bool = False) -> dict[str, Any]:
    """What is sent to ``PATH``. ``timeout_s`` is the request's deadline; no earlier answer is asked for."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text_of(call.number, call.prompt_tokens)}],
        "max_tokens": call.output_tokens,
        "fairlane": {"timeout_ms": max(1, round(timeout_s * 1_000)), "cache": "none"},
    }
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body
