"""Replies as lines of OpenAI batch output files. Pure."""

from typing import Any

from fairlane.records import InferenceReply
from producers.openai_api.errors import error_body, error_of
from producers.openai_api.response_bodies import RequestEcho, chat_completion, completion, embeddings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
URLS = (CHAT, COMPLETIONS, EMBEDDINGS)


def body_of(url: str, reply: InferenceReply, created_s: int) -> str:
    """The body of a response to a reply that is ``ok``, as JSON: as the gateway answers."""
    asked = RequestEcho(reply.request_id, reply.model or "", created_s)
    if url == EMBEDDINGS:
        return embeddings(reply, asked, as_base64=False, dimensions=None).decode()
    return (chat_completion if url == CHAT else completion)(reply, asked).decode()


def error_response_of(reply: InferenceReply) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the body of a response to a reply that is not ``ok``."""
    error = error_of(reply)
    if error is None:
        raise ValueError("the reply is ok")
    return error.status, error_body(error)
