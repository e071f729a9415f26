"""Continue a stream whose run restarted, for clients that cannot discard text already sent. Pure."""

from fairlane.client.reassembly import TextDelta


class DivergedError(Exception):
    """The restarted answer differs from the text already sent, which cannot be withdrawn."""


class Continuation:
    """Compares the text already sent with the text of a restarted run.

    A run may be lost with its machine; the next run starts from the beginning. While it repeats the text already sent,
    which is usual without sampling, nothing is sent until it goes beyond that text. If it differs, the stream ends.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._again: str | None = None
        """Text since the last restart, until it covers all that was sent."""

    @property
    def sent(self) -> str:
        """All text sent so far."""
        return "".join(self._sent)

    def feed(self, delta: TextDelta) -> str:
        """Return the text to send now; may be empty. Raises DivergedError."""
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
        """Check the end of an ``ok`` answer. Raises DivergedError: it is shorter than the text sent."""
        if self._again is not None and self._again != self.sent:
            raise DivergedError
