"""Reassembles streamed text from chunks that may be late, repeated, lost or of an abandoned run. Pure."""

from dataclasses import dataclass

from fairlane.kafka_config import MAX_MESSAGE_BYTES
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, ReplyChunk

_MAX_HELD_CHUNKS = 1_024
# No reply is larger than a message, so no honest run has more text than this.
_MAX_CHARS = MAX_MESSAGE_BYTES


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of a streamed answer.

    ``str()`` of it is for people who watch: it says so when the text starts again. Programs take ``text`` and heed
    ``restarted``, or use ``stream.text`` or the reply when all is there.

    Attributes:
        text: what follows the text so far; never empty unless ``restarted``.
        restarted: all the text before this delta is void, and the answer begins anew with this one. So it is when the
            run was lost with its machine and another one took its place.
        attempt: 1 for the first text, and one more with every restart.
    """

    text: str
    restarted: bool = False
    attempt: int = 1

    def __str__(self) -> str:
        return f"\n[started again]\n{self.text}" if self.restarted else self.text


class Reassembly:
    """The text of one request: fed with its chunks and its reply in any order, emptied by ``take``.

    Chunks are ordered by (generation, attempt), the run they come from, and within a run by ``seq``, which counts from
    0. A newer run replaces an older one. A chunk that comes too early is held back until those before it are here, and
    if they never come, the reply has the text. What was given to ``finish`` is what all taken deltas make in the end.
    """

    def __init__(self) -> None:
        self._run: tuple[int, int] | None = None
        self._next_seq = 0
        self._chars = 0
        self._held: dict[int, str] = {}
        self._taken: list[str] = []
        self._pending: list[str] = []
        self._restarting = False
        self._attempt = 1
        self._finished = False

    @property
    def text(self) -> str:
        """The text of all deltas taken so far."""
        return "".join(self._taken)

    def add(self, chunk: ReplyChunk) -> bool:
        """Feed a chunk; whether there is something to take now. It is ignored if it brings nothing new."""
        run = (chunk.generation, chunk.attempt)
        if self._finished or (self._run is not None and run < self._run):
            return False
        if run != self._run:
            self._begin(run)
        too_late, too_much = chunk.seq < self._next_seq, self._chars + len(chunk.text) > _MAX_CHARS
        if too_late or too_much or chunk.seq in self._held:
            return False
        if chunk.seq > self._next_seq and len(self._held) >= _MAX_HELD_CHUNKS:
            return False
        self._chars += len(chunk.text)
        self._held[chunk.seq] = chunk.text
        before = len(self._pending)
        while (text := self._held.pop(self._next_seq, None)) is not None:
            self._next_seq += 1
            if text:
                self._pending.append(text)
        return len(self._pending) > before

    def finish(self, reply: InferenceReply) -> None:
        """Feed the final reply. If it is ``ok``, its text is the one that counts; chunks are ignored from now on."""
        self._finished = True
        self._held.clear()
        if reply.outcome != Outcome.OK:
            self._restarting = self._restarting and bool(self._pending)
            return
        final = "" if reply.output is None or reply.output.text is None else reply.output.text
        taken = self.text
        self._restarting = not final.startswith(taken)
        self._pending = [final if self._restarting else final[len(taken) :]]

    def take(self) -> TextDelta | None:
        """All text that has come since the last call, as one delta; None if there is nothing new."""
        text = "".join(self._pending)
        restarted = self._restarting and bool(text or self._finished)
        if not (text or restarted):
            return None
        self._pending = []
        if restarted:
            self._restarting = False
            self._attempt += 1
            self._taken = []
        self._taken.append(text)
        return TextDelta(text, restarted, self._attempt)

    def _begin(self, run: tuple[int, int]) -> None:
        self._run = run
        self._next_seq = 0
        self._chars = 0
        self._held.clear()
        self._pending = []
        # Who has been given nothing yet has nothing to throw away.
        self._restarting = bool(self._taken)
