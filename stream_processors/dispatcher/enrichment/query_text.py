"""The search query of a request. Pure."""

from fairlane.records import InferenceRequest

MAX_QUERY_CHARS = 2_000
"""Questions are short; in a longer text the question may be at either end."""

_USER = "user"


def query_text(request: InferenceRequest) -> str:
    """The user's last message, or the prompt; above MAX_QUERY_CHARS its beginning and its end. Empty without text."""
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
