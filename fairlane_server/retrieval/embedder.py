"""The port of embedders: whatever turns text into vectors."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


class EmbedderError(Exception):
    """The texts were not embedded; the message says why, in one line and without the texts."""


class TextRefusedError(EmbedderError):
    """One of the texts cannot be embedded, however often it is tried: it is too long, or of no use to the model."""


class Embedder(Protocol):
    """Embeds in bulk. Vectors of embedders with different names cannot be compared."""

    @property
    def name(self) -> str:
        """Model and version, as it is stored with a collection."""

    @property
    def dimensions(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """Vectors of unit length, of shape (texts, dimensions), in the order of the texts; zeros for a text without a
        single known token. Raises EmbedderError, TextRefusedError."""


class QueryEmbedder(Protocol):
    """Embeds one query within an event loop, as the embedder of the same name does."""

    @property
    def name(self) -> str: ...

    @property
    def dimensions(self) -> int: ...

    async def embed_query(self, text: str) -> FloatArray:
        """A vector of shape (dimensions,). Raises EmbedderError. The caller bounds the time."""


class OpenEmbedder(Embedder, Protocol):
    """An embedder with whoever made it."""

    def close(self) -> None:
        """Let go of connections; it embeds nothing afterwards. May be called again."""


class OpenQueryEmbedder(QueryEmbedder, Protocol):
    """A query embedder with whoever made it."""

    async def aclose(self) -> None:
        """Let go of connections; it embeds nothing afterwards. May be called again."""
