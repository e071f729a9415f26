"""An embedder that is loaded beside everything else: nobody waits for it, and nothing stops because it cannot be."""

import asyncio
from collections.abc import Callable

from fairlane.logs import get_logger
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray, OpenQueryEmbedder

log = get_logger(__name__)


class LazyEmbedder:
    """Until it is loaded, and after that failed, everything it is asked raises EmbedderError with the reason."""

    def __init__(self, make: Callable[[], OpenQueryEmbedder]) -> None:
        self._make = make
        self._loaded: OpenQueryEmbedder | None = None
        self._problem = "the embedder is still being loaded"

    async def load(self) -> None:
        """Never raises but when it is cancelled."""
        try:
            self._loaded = await asyncio.get_running_loop().run_in_executor(None, self._make)
        except Exception as error:  # noqa: BLE001 - requests are answered without passages rather than not at all
            self._problem = f"the embedder cannot be loaded: {error}"
            log.error("embedder_not_loaded", error=str(error), kind=type(error).__name__)

    @property
    def name(self) -> str:
        """Raises EmbedderError."""
        return self._embedder.name

    @property
    def dimensions(self) -> int:
        """Raises EmbedderError."""
        return self._embedder.dimensions

    async def embed_query(self, text: str) -> FloatArray:
        """Raises EmbedderError."""
        return await self._embedder.embed_query(text)

    async def aclose(self) -> None:
        """Let go of what it holds."""
        if self._loaded is not None:
            await self._loaded.aclose()

    @property
    def _embedder(self) -> OpenQueryEmbedder:
        if self._loaded is None:
            raise EmbedderError(self._problem)
        return self._loaded
