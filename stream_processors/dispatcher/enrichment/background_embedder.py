"""An embedder that is loaded in the background, and again after a failure."""

import asyncio
from collections.abc import Callable
from random import random

from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray, QueryEmbedder

log = get_logger(__name__)

RETRIES = Backoff(first_s=1.0, longest_s=60.0)


class BackgroundEmbedder:
    """Until it is loaded, every use raises EmbedderError with the reason: requests are then answered without passages.

    Args:
        make: loads the embedder, on a thread.
        on_problem: called with the reason after each failure, and with None once it is loaded.
        retries: delays between attempts.
    """

    def __init__(
        self,
        make: Callable[[], QueryEmbedder],
        on_problem: Callable[[str | None], None],
        retries: Backoff = RETRIES,
    ) -> None:
        self._make = make
        self._on_problem = on_problem
        self._retries = retries
        self._loaded: QueryEmbedder | None = None
        self._problem = "the embedder is still being loaded"

    async def load(self) -> None:
        """Load the embedder, with retries until it succeeds. Raises only CancelledError."""
        failures = 0
        while self._loaded is None:
            try:
                self._loaded = await asyncio.get_running_loop().run_in_executor(None, self._make)
            except Exception as error:  # noqa: BLE001 - requests are answered without passages rather than not at all
                failures += 1
                self._problem = f"the embedder cannot be loaded: {error}"
                self._on_problem(self._problem)
                log.error("embedder_not_loaded", error=str(error), kind=type(error).__name__, times=failures)
                await asyncio.sleep(self._retries.delay_s(failures, random()))  # noqa: S311 - jitter, no secret
        self._on_problem(None)

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
        if self._loaded is not None:
            await self._loaded.aclose()

    @property
    def _embedder(self) -> QueryEmbedder:
        if self._loaded is None:
            raise EmbedderError(self._problem)
        return self._loaded
