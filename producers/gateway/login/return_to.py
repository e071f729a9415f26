"""The path to continue at after a login: one of our own origin, or none. Pure."""

import re
from urllib.parse import unquote

MOST_CHARACTERS = 1_024
_START = "/"
# Printable ASCII that a URL may have; no backslash, which browsers read as a slash.
_ALLOWED = re.compile(r"/[A-Za-z0-9\-._~!$&'()*+,;=:@/?%#\[\]]*")
_MOST_ROUNDS = 4
_OWN_ROUTES = "/auth/"


def checked_path(text: str) -> str | None:
    """The path with its query, or None for anything that a browser, or a proxy that decodes it, could take for an
    address of another host, and for the routes of the login itself."""
    if len(text) > MOST_CHARACTERS or _ALLOWED.fullmatch(text) is None or "//" in text.partition("?")[0]:
        return None
    decoded = text
    for _ in range(_MOST_ROUNDS):
        path = decoded.partition("?")[0]
        is_plain = path.startswith(_START) and "//" not in path and "\\" not in decoded and decoded.isprintable()
        if not is_plain or f"{path}/".startswith(_OWN_ROUTES):
            return None
        before, decoded = decoded, unquote(decoded)
        if decoded == before:
            return text
    return None
