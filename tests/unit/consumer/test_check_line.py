"""The line to a check's process, with the other end as the process has it."""

import os
import struct
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import pytest

from inference_consumers.engine_process.messages import Channel
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.process.line import MOST_BYTES, Line
from inference_consumers.guardrails.process.messages import Ask, Found, from_check, to_check

LARGE = "x" * (4 << 20)
"""More than the kernel keeps for a reader."""


class Ends:
    def __init__(self) -> None:
        ours, self.theirs = Pipe()
        self.line = Line(Channel(ours))
        self.woken = os.eventfd(0, os.EFD_NONBLOCK)

    def exchange(self, timeout_s: float = 0.0) -> list[bytes]:
        return self.line.exchange(timeout_s, self.woken)

    def wait(self) -> bytes:
        for _ in range(10_000):
            for message in self.exchange(1.0):
                return message
        raise AssertionError("no message")

    def raw(self, data: bytes) -> None:
        """Bytes from a process that breaks the framing, or is stopped within it."""
        os.write(self.theirs.fileno(), data)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def answering(theirs: Connection) -> None:
    channel = Channel(theirs)
    asked = to_check.decode(channel.read())
    assert isinstance(asked, Ask)
    channel.write(Found(asked.call_id, ((Finding(asked.texts[0], 0, 1, 1.0),),)))


def test_large_messages_pass_in_both_directions(ends: Ends) -> None:
    other = threading.Thread(target=answering, args=(ends.theirs,), daemon=True)
    other.start()
    ends.line.send(Ask(7, (LARGE,), CheckContext()))
    found = from_check.decode(ends.wait())
    assert isinstance(found, Found)
    assert found.call_id == 7
    other.join(10)
    assert not other.is_alive()


def test_a_process_that_reads_nothing_holds_nobody_up(ends: Ends) -> None:
    """A write that waits would never return: nobody reads."""
    ends.line.send(Ask(1, (LARGE,), CheckContext()))
    for _ in range(100):
        assert ends.exchange() == []


def test_a_process_that_is_stopped_in_its_answer_holds_nobody_up(ends: Ends) -> None:
    answer = msgspec.msgpack.encode(Found(1))
    framed = struct.pack("!i", len(answer)) + answer
    ends.raw(framed[:2])
    assert ends.exchange() == []
    ends.raw(framed[2:-1])
    assert ends.exchange() == []
    ends.raw(framed[-1:] + framed)
    assert ends.exchange() == [answer, answer]


def test_it_returns_when_it_is_woken(ends: Ends) -> None:
    os.eventfd_write(ends.woken, 1)
    assert ends.exchange(3_600) == []


@pytest.mark.parametrize("length", [-1, MOST_BYTES + 1])
def test_a_length_beyond_the_bound_is_no_message(ends: Ends, length: int) -> None:
    ends.raw(struct.pack("!i", length))
    with pytest.raises(msgspec.DecodeError):
        ends.exchange()


def test_the_end_of_the_process_shows(ends: Ends) -> None:
    ends.theirs.close()
    with pytest.raises(EOFError):
        ends.exchange(1.0)
