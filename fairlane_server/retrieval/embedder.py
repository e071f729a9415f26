"""The port of embedders, and checks and normalisation of their vectors."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fairlane_server.store_error import ReportableError

FloatArray = NDArray[np.float32]


class EmbedderError(ReportableError):
    """The texts were not embedded; the message says why, in one line and without the texts."""


class TextRefusedError(EmbedderError):
    """One of the texts cannot be embedded, however often it is tried: it is too long, or of no use to the model."""


class Embedder(Protocol):
    """Embeds in bulk. Vectors of embedders with different names cannot be compared."""

    @property
    def name(self) -> str:
        """Model and version, stored with each collection."""

    @property
    def dimensions(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """Vectors of unit length, of shape (texts, dimensions), in the order of the texts; zeros for a text without a
        single known token. Raises EmbedderError, TextRefusedError."""

    def close(self) -> None:
        """Close connections; nothing can be embedded afterwards. May be called again."""


class QueryEmbedder(Protocol):
    """Embeds one query within an event loop, as the embedder of the same name does."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    async def embed_query(self, text: str) -> FloatArray:
        """A vector of shape (dimensions,). Raises EmbedderError. The caller bounds the time."""

    async def aclose(self) -> None:
        """As ``Embedder.close``."""


def unit_vectors(rows: Any, count: int, dimensions: int) -> FloatArray:
    """Vectors from outside as float32 of unit length, shape (count, dimensions); zeros stay zeros.

    Raises EmbedderError when they are of another shape, or are no finite numbers.
    """
    try:
        given = np.asarray(rows, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise EmbedderError("the answer has vectors of different lengths, or of something else than numbers") from error
    if given.shape != (count, dimensions):
        raise EmbedderError(f"the answer has the shape {given.shape} instead of {(count, dimensions)}")
    if not np.isfinite(given).all():
        raise EmbedderError("the answer has numbers that are not finite")
    # Scaled first: squares of very large or very small numbers would not be finite, or nothing.
    largest = np.abs(given).max(axis=1, keepdims=True)
    scaled = given / np.where(largest > 0, largest, 1.0)
    lengths = np.linalg.norm(scaled, axis=1, keepdims=True)
    unit: FloatArray = (scaled / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return unit


def embed_texts(texts: Sequence[str], dimensions: int, embed: Callable[[list[str]], FloatArray]) -> FloatArray:
    """``embed`` on the texts that hold something; zeros for the others, which no server is asked about."""
    vectors = np.zeros((len(texts), dimensions), dtype=np.float32)
    if filled := [index for index, text in enumerate(texts) if text.strip()]:
        vectors[filled] = embed([texts[index] for index in filled])
    return vectors


def batches(texts: Sequence[str], most_texts: int, most_characters: int) -> list[list[str]]:
    """The texts in their order, in lists within both bounds; a text that is too long alone has a list of its own."""
    found: list[list[str]] = []
    held = 0
    for text in texts:
        if not found or len(found[-1]) >= most_texts or held + len(text) > most_characters:
            found.append([])
            held = 0
        found[-1].append(text)
        held += len(text)
    return found
