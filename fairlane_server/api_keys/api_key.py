"""Format of API keys: ``fl_<key id>_<secret>``. The id names the key in tables and logs, the secret proves it. Pure."""

import re
import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

DEPLOYMENT = "_deployment"
"""Stands for a tenant where an identity belongs to the deployment. No tenant can have this name."""


class Role(StrEnum):
    """Roles of identities; ``permissions.py`` has what each may do."""

    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"
    VIEWER = "viewer"


class Scope(StrEnum):
    """Restriction of a key. A key without scopes may do all that its role may."""

    INFERENCE = "inference"
    RESULTS = "results"
    FILES = "files"
    BATCHES = "batches"
    LOADS = "loads"
    MODELS = "models"
    TENANTS = "tenants"
    DEAD_LETTERS = "dead_letters"
    IDENTITIES = "identities"
    AUDIT = "audit"
    EVALUATIONS = "evaluations"
    LABELS = "labels"


SECRET_BYTES = 32
_KEY_ID_BYTES = 8
_KEY = re.compile(r"fl_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)
_PREFIX = "fl_"


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key. ``key_id`` is 16 hexadecimal digits; ``text`` is the whole key and is stored nowhere.

    Only a hash of the secret is stored. The secret has 256 random bits, so a slow hash would add nothing.
    """

    key_id: str
    text: str = field(repr=False)
    secret_sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A key as a caller presents it: the key id, and the hash of the claimed secret."""

    key_id: str
    secret_sha256: bytes = field(repr=False)


def new_key() -> NewKey:
    key_id, secret = secrets.token_hex(_KEY_ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    return NewKey(key_id, f"{_PREFIX}{key_id}_{secret}", _hash(secret))


def looks_like_key(text: str) -> bool:
    """Whether the text has the prefix of a key, as opposed to a token."""
    return text.startswith(_PREFIX)


def parse_key(text: str) -> PresentedKey | None:
    """The parts of a key; None if the text is malformed. Does not check that the key exists."""
    found = _KEY.fullmatch(text)
    return None if found is None else PresentedKey(found[1], _hash(found[2]))


def _hash(secret: str) -> bytes:
    return sha256(secret.encode("ascii")).digest()
