"""How a key looks: ``fl_<key id>_<secret>``. The id names it in tables and logs, the secret proves it. Pure."""

import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256

SECRET_BYTES = 32
_KEY_ID_BYTES = 8
_KEY = re.compile(r"fl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_PREFIX = "fl_"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was just made. ``text`` is all that its holder needs, and is stored nowhere.

    Attributes:
        key_id: 16 hexadecimal digits.
        text: the whole key.
        secret_sha256: what is stored of the secret. It is 256 random bits, so that no guess is worth a slow hash.
    """

    key_id: str
    text: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """What somebody showed: the id of a key, and the hash of what is said to be its secret."""

    key_id: str
    secret_sha256: bytes = field(repr=False)


def new_key() -> NewKey:
    """A key that nobody can guess."""
    key_id, secret = secrets.token_hex(_KEY_ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    return NewKey(key_id, f"{_PREFIX}{key_id}_{secret}", _hash(secret))


def looks_like_key(text: str) -> bool:
    """Whether this wants to be a key, rather than a token."""
    return text.startswith(_PREFIX)


def parse_key(text: str) -> PresentedKey | None:
    """The parts of a key; None if it is none, whatever keys there are."""
    found = _KEY.fullmatch(text)
    return None if found is None else PresentedKey(found[1], _hash(found[2]))


def _hash(secret: str) -> bytes:
    return sha256(secret.encode("ascii")).digest()
