"""The consumer's end of the line to the process of a check. It never waits for the process, which may be stopped, or
end, in the middle of a message.
"""

import contextlib
import os
import select
import struct

import msgspec

from inference_consumers.engine_process.messages import Channel

MOST_BYTES = 1 << 26
"""Of a message from a process: several times the longest answer after its post-processing."""

_LENGTH = struct.Struct("!i")
"""Before each message, as ``multiprocessing.connection`` has it at the other end."""

_READ_BYTES = 1 << 18


class Line:
    """For one thread. Takes over the channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._descriptor = channel.fileno()
        os.set_blocking(self._descriptor, False)
        self._encoder = msgspec.msgpack.Encoder()
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Have this sent by the next calls of ``exchange``. Raises UnicodeEncodeError for invalid text."""
        data = self._encoder.encode(message)
        self._outgoing += _LENGTH.pack(len(data)) + data

    def exchange(self, timeout_s: float, woken: int) -> list[bytes]:
        """Wait until something can be sent or read, at most for this time or until the descriptor ``woken`` can be
        read; send and read what goes at once. Returns the messages that are complete.

        Raises:
            EOFError, OSError: the process is gone.
            msgspec.DecodeError: it sent what is no message.
        """
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(woken, select.POLLIN)
        ready = dict(poll.poll(round(1_000 * timeout_s)))
        if ready.get(self._descriptor, 0) & select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                sent = os.write(self._descriptor, self._outgoing)
                del self._outgoing[:sent]
        if ready.get(self._descriptor, 0) & ~select.POLLOUT:
            with contextlib.suppress(BlockingIOError):
                read = os.read(self._descriptor, _READ_BYTES)
                if not read:
                    raise EOFError
                self._incoming += read
        return self._complete()

    def close(self) -> None:
        self._channel.close()

    def _complete(self) -> list[bytes]:
        messages: list[bytes] = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if not 0 <= length <= MOST_BYTES:
                raise msgspec.DecodeError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[_LENGTH.size : end]))
            del self._incoming[:end]
        return messages
