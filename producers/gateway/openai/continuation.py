"""What of a streamed answer may be sent to somebody who cannot be told that it began again. Pure."""

from fairlane.client.reassembly import TextDelta


class DivergedError(Exception):
    """The answer began again and became another one: what was sent cannot be taken back."""


class Continuation:
    """The text that was sent, and the text there is.

    A run may be lost with its machine; the next one begins anew. Where it says the same again, which is usual without
    sampling, it is followed silently until it says more. Where it does not, the stream is over.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._again: str | None = None
        """The text since the last restart, as long as it is not all that was sent."""

    @property
    def sent(self) -> str:
        """All text that was sent."""
        return "".join(self._sent)

    def feed(self, delta: TextDelta) -> str:
        """The text to send now; may be empty. Raises DivergedError."""
        if delta.restarted:
            self._again = ""
        if self._again is None:
            self._sent.append(delta.text)
            return delta.text
        again, sent = self._again + delta.text, self.sent
        if not again.startswith(sent):
            if not sent.startswith(again):
                raise DivergedError
            self._again = again
            return ""
        self._again = None
        self._sent = [again]
        return again[len(sent) :]

    def finish(self) -> None:
        """No more deltas come, and the answer was ``ok``. Raises DivergedError: it is shorter than what was sent."""
        if self._again is not None and self._again != self.sent:
            raise DivergedError
