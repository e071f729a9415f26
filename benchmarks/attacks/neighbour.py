"""An honest tenant beside a hostile one: requests at an even pace, and how long each waits for its reply."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Self

from benchmarks.load import LoadGenerator, Planned
from fairlane.codec import Codec
from fairlane.records import InferenceRequest
from fairlane.settings import KafkaSettings

_TIMEOUT_S = 60.0


class Neighbour(LoadGenerator):
    """Latencies are from just before the publish to the reply at a reader, in the order of the replies."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        tenant: str,
        make_request: Callable[[], InferenceRequest],
        per_s: float = 25.0,
    ) -> None:
        """The tenant's topics must exist."""
        super().__init__(settings, (tenant,), codec)
        self._tenant, self._make_request, self._interval_s = tenant, make_request, 1 / per_s

    @contextmanager
    def sending(self) -> Iterator[Self]:
        """Requests go out until the context ends; AssertionError unless every one was answered ``ok``, once."""
        with self:
            self.start(
                Planned.of(self._make_request(), self._tenant, self.codec, number * self._interval_s)
                for number in count()
            )
            yield self
            self.cut()
            self.wait_published(_TIMEOUT_S)
            self.wait_answered(_TIMEOUT_S)
            if refused := {one.outcome for one in self.observed() if not one.served}:
                raise AssertionError(f"some requests ended as {sorted(refused)}")

    def mark(self) -> int:
        """A place among the latencies; see ``latencies_s``."""
        return len(self.replied_at)

    def wait_for(self, more: int) -> None:
        """Wait until so many more requests were answered."""
        self.wait_replies(more, _TIMEOUT_S)

    def latencies_s(self, since: int = 0) -> list[float]:
        """Those from a mark on."""
        return [at - self.published_at[request_id] for request_id, at in list(self.replied_at.items())[since:]]
