"""The process of one check: it loads the check and looks at what its consumer sends, until the consumer is gone.

It has no credentials, reads no settings and writes nothing but its answers: its standard streams lead nowhere, because
a library's warning or traceback may quote a text.
"""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic

from fairlane_server.processes.core_files import no_core_file
from fairlane_server.processes.memory import bound_growth
from fairlane_server.processes.parent import die_with_parent
from inference_consumers.engine_process.failures import is_out_of_memory
from inference_consumers.engine_process.messages import Channel
from inference_consumers.guardrails.check import Check, CheckUnavailableError, Processor
from inference_consumers.guardrails.process.messages import (
    OUT_OF_MEMORY_STATUS,
    Ask,
    Found,
    Load,
    Ready,
    Unavailable,
    to_check,
)

_Load = Callable[[str, Path], Check | Processor]


def main(load: _Load) -> int:
    """Serve the consumer at the other end of the file descriptor that the command line names. Returns the exit
    status."""
    die_with_parent(signal.SIGKILL)
    # They are meant for the consumer, which ends this process when it needs it no more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    no_core_file()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    try:
        return _serve(Channel(Connection(descriptor)), load)
    except (EOFError, OSError):
        return 0
    except MemoryError:
        # What is left of its memory may be in pieces, and threads of a library may wait for some.
        os._exit(OUT_OF_MEMORY_STATUS)


def _serve(channel: Channel, load: _Load) -> int:
    first = to_check.decode(channel.read())
    if not isinstance(first, Load):
        raise TypeError(f"{type(first).__name__} came before Load")
    started = monotonic()
    try:
        check = load(first.check, Path(first.models_dir))
    except CheckUnavailableError as error:
        channel.write(Unavailable(" ".join(error.reason.split())))
        return 1
    except Exception as error:  # noqa: BLE001 - whatever its library raises, the consumer must know the reason
        channel.write(Unavailable(type(error).__name__))
        return 1
    bound_growth(first.memory_bytes)
    channel.write(Ready(monotonic() - started))
    while True:
        message = to_check.decode(channel.read())
        if not isinstance(message, Ask):
            raise TypeError(f"{type(message).__name__} is no question")
        try:
            channel.write(_answer(check, message))
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            channel.write(Found(message.call_id, error=type(error).__name__))


def _answer(check: Check | Processor, asked: Ask) -> Found:
    try:
        if isinstance(check, Processor):
            return Found(asked.call_id, tuple(check.process(asked.texts, asked.context)))
        return Found(asked.call_id, tuple(map(tuple, check.find(asked.texts, asked.context))))
    except Exception as error:  # noqa: BLE001 - the text of any exception may quote what was looked at
        if is_out_of_memory(error):
            raise MemoryError from None
        return Found(asked.call_id, error=type(error).__name__)
