"""Nearest stored questions by cosine similarity. Pure."""

from collections.abc import Sequence

import msgspec
import numpy as np

from fairlane_server.caching.entries import DIGEST_BYTES, UNREADABLE
from fairlane_server.retrieval.embedder import FloatArray

_HALF = np.dtype("<f2")


Wording = tuple[bytes, bytes]
"""Digests of a question's words, sorted and in order (``fairlane_server.caching.responses.word_digests``)."""

NO_WORDING: Wording = (b"", b"")


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    response: bytes
    """Digest of the answer's cache key."""
    vector: bytes
    wording: Wording = NO_WORDING


_decoder = msgspec.msgpack.Decoder(_Row)


def encode_row(vector: FloatArray, response: bytes, wording: Wording = NO_WORDING) -> bytes | None:
    """Encode a question's vector of shape (dimensions,), in half precision, with the digest of its answer's key. None
    for a vector that has no cosine: all zeros, or not finite."""
    with np.errstate(over="ignore"):
        half = np.asarray(vector, dtype=np.float32).astype(_HALF)
    if not np.isfinite(half).all() or not half.any():
        return None
    return msgspec.msgpack.encode(_Row(response, half.tobytes(), wording))


def nearest(
    vector: FloatArray,
    rows: Sequence[bytes | None],
    threshold: float,
    most: int,
    wording: Wording = NO_WORDING,
) -> list[tuple[float, bytes]] | None:
    """Return the most similar rows as (similarity, response), best first, each response once.

    Args:
        vector: of shape (dimensions,).
        rows: from ``encode_row``; None, unreadable rows and those of other dimensions are skipped.
        threshold: least cosine similarity.
        most: most pairs returned.
        wording: of the question. A row with the same words in another order is skipped: the vectors may be equal
            although the meanings are opposite.

    Returns:
        None if there is no usable row at all.
    """
    # Double precision: squares and sums of single-precision values cannot overflow in it.
    query = np.asarray(vector, dtype=np.float64)
    good = [row for row in map(_decoded, rows) if row is not None and len(row.vector) == _HALF.itemsize * query.size]
    if not good:
        return None
    stored = np.frombuffer(b"".join(row.vector for row in good), dtype=_HALF).astype(np.float32)
    stored = stored.reshape(len(good), query.size)
    # A norm is not finite if any number of its row is not.
    norms = np.sqrt(np.einsum("ij,ij->i", stored, stored))
    finite = np.isfinite(norms)
    if not finite.any():
        return None
    length = np.linalg.norm(query)
    if not (np.isfinite(length) and length > 0):
        return []
    stored[~finite], norms[~finite] = 0.0, 0.0
    unit = (query / length).astype(np.float32)
    similarity = np.divide(stored @ unit, norms, out=np.full(len(good), -1.0, np.float32), where=norms > 0)
    found: dict[bytes, float] = {}
    for index in np.argsort(-similarity, kind="stable"):
        if similarity[index] < threshold or len(found) == most:
            break
        words, order = good[index].wording
        if words == wording[0] and order != wording[1]:
            continue
        found.setdefault(good[index].response, float(similarity[index]))
    return [(similar, response) for response, similar in found.items()]


def _decoded(row: bytes | None) -> _Row | None:
    if row is None:
        return None
    try:
        decoded = _decoder.decode(row)
    except UNREADABLE:
        return None
    return decoded if len(decoded.response) == DIGEST_BYTES else None
