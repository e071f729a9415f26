"""Public keys of a token issuer, from its JSON Web Key Set (RFC 7517). Pure."""

import json
from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK, PyJWTError

MOST_KEYS = 100
MOST_KEY_ID_CHARACTERS = 256
LEAST_RSA_BITS, MOST_RSA_BITS = 2_048, 8_192

_ALGORITHM_OF_KIND = {("RSA", None): "RS256", ("EC", "P-256"): "ES256"}
ALGORITHMS = tuple(_ALGORITHM_OF_KIND.values())
"""Accepted signature algorithms. Each key has exactly one of them, whatever a token says."""

_PRIVATE = "d"


class KeySetError(Exception):
    """The issuer's key set is unavailable or invalid. The message names no address and quotes nothing of it."""


def parse_key_set(document: bytes) -> Mapping[str, PyJWK]:
    """The usable keys by id; others are skipped. Raises KeySetError."""
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError):
        raise KeySetError("it is no JSON") from None
    entries = parsed.get("keys") if isinstance(parsed, dict) else None
    if not isinstance(entries, list):
        raise KeySetError("it has no list of keys")
    if len(entries) > MOST_KEYS:
        raise KeySetError(f"it has more than {MOST_KEYS} keys")
    found: dict[str, PyJWK] = {}
    for entry in entries:
        if isinstance(entry, dict) and (key := _signing_key(entry)) is not None:
            found.setdefault(entry["kid"], key)
    return found


def _signing_key(entry: Mapping[str, Any]) -> PyJWK | None:
    key_id, kind, curve = entry.get("kid"), entry.get("kty"), entry.get("crv")
    if not isinstance(key_id, str) or not 1 <= len(key_id) <= MOST_KEY_ID_CHARACTERS:
        return None
    # A published private key proves nothing.
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)) or _PRIVATE in entry:
        return None
    algorithm = _ALGORITHM_OF_KIND.get((kind, curve))
    operations = entry.get("key_ops", ["verify"])
    if (
        algorithm is None
        or entry.get("alg", algorithm) != algorithm
        or entry.get("use", "sig") != "sig"
        or not isinstance(operations, list)
        or "verify" not in operations
    ):
        return None
    try:
        key = PyJWK(dict(entry), algorithm)
    except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return key if _is_sound(key.key) else None


def _is_sound(key: object) -> bool:
    if isinstance(key, RSAPublicKey):
        # The cost of verification grows with the key.
        return LEAST_RSA_BITS <= key.key_size <= MOST_RSA_BITS
    return isinstance(key, EllipticCurvePublicKey)
