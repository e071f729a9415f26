"""Which remembered questions mean the same as this one. Pure."""

from collections.abc import Sequence

import msgspec
import numpy as np

from fairlane_server.caching.entries import UNREADABLE
from fairlane_server.caching.keys import DIGEST_BYTES
from fairlane_server.retrieval.embedder import FloatArray

_HALF = np.dtype("<f2")


Wording = tuple[bytes, bytes]
"""Digests of a question's words in whatever order, and in theirs (``fairlane_server.caching.responses.wording``)."""

NO_WORDING: Wording = (b"", b"")


class _Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    response: bytes
    """The digest of the key of its answer."""
    vector: bytes
    wording: Wording = NO_WORDING


_decoder = msgspec.msgpack.Decoder(_Row)


def encode_row(vector: FloatArray, response: bytes, wording: Wording = NO_WORDING) -> bytes | None:
    """A question's vector, of shape (dimensions,) and kept in half precision, with the digest of its answer's key. None
    for a vector that is like no other: all zeros, or not finite."""
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
    """The most similar of what ``encode_row`` made, from the threshold on, best first and each response once.

    Args:
        vector: of shape (dimensions,).
        rows: anything else among them, or of other dimensions, is passed over.
        threshold: least cosine similarity.
        most: pairs of similarity and response.
        wording: of the question. One of the same words in another order is like no other: their vectors may be the same
            where their meanings are opposite.

    Returns:
        None if there is no usable row at all.
    """
    # Whatever fits into single precision can be squared and added up in double.
    query = np.asarray(vector, dtype=np.float64)
    good = [row for row in map(_decoded, rows) if row is not None and len(row.vector) == _HALF.itemsize * query.size]
    if not good:
        return None
    stored = np.frombuffer(b"".join(row.vector for row in good), dtype=_HALF).astype(np.float32)
    stored = stored.reshape(len(good), query.size)
    # Not finite if any number of the row is not.
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
