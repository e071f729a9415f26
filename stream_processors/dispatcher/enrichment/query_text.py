"""The search query of a request. Pure."""

from fairlane.records import InferenceRequest

MAX_QUERY_CHARS = 2_000
"""A question is short; of a long text the end says more often what is wanted, but it has no one place that does."""

_USER = "user"


def query_text(request: InferenceRequest) -> str:
    """The last thing the user said, at most MAX_QUERY_CHARS of it: its beginning and its end. Empty if there is
    nothing to look for."""
    given = request.input
    text = given.prompt or given.query or ""
    for message in given.messages or ():
        if message.role == _USER and message.content.strip():
            text = message.content
    text = text.replace("\0", " ").strip()
    if len(text) <= MAX_QUERY_CHARS:
        return text
    half = MAX_QUERY_CHARS // 2
    return f"{text[:half]} {text[-half + 1 :]}"
