"""Checks and normalisation of embedding vectors."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fairlane_server.retrieval.embedder import EmbedderError, FloatArray


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
