"""Query vectors from an embedder, cached if the embedder is slow."""

from dataclasses import dataclass

from fairlane_server.retrieval.embedder import FloatArray, QueryEmbedder
from stream_processors.dispatcher.response_cache.caches import EmbeddingCache


@dataclass(frozen=True, slots=True)
class QueryEmbeddings:
    """Embeds queries. ``cache`` is None for an embedder faster than a cache look-up."""

    embedder: QueryEmbedder
    cache: EmbeddingCache | None = None

    @property
    def name(self) -> str:
        """The embedder's name. Raises EmbedderError."""
        return self.embedder.name

    async def embed(self, tenant: str, text: str) -> FloatArray:
        """A vector of shape (dimensions,). Raises EmbedderError. The caller bounds the time."""
        if self.cache is None:
            return await self.embedder.embed_query(text)
        return await self.cache.embed(tenant, self.embedder, text)
