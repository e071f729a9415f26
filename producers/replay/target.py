"""Where load goes: the port of load generators, over the gateway or the client."""

from collections.abc import Callable
from typing import Protocol

from producers.replay.outcome import Answer
from producers.replay.plan import Call

OnText = Callable[[], None]


class Target(Protocol):
    """A way into Fairlane, for any number of tasks at once."""

    async def start(self) -> None:
        """Make ready. Raises what its own errors are when it cannot work at all."""
        ...

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> Answer:
        """Make one call and wait for the end of its answer. May be cancelled at any time, and leaves nothing behind.

        Args:
            call: what to ask, in whose name.
            timeout_s: how long its asker waits; the service is told, where it can be. Whoever calls ends the wait.
            on_text: called when the first text of a stream is here.
        """
        ...

    async def close(self) -> None: ...
