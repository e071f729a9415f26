"""Messages between a consumer and the process of a check."""

import msgspec

from inference_consumers.guardrails.check import CheckContext, Finding, Processed

OUT_OF_MEMORY_STATUS = 12
"""Exit status of a process that needed more memory than it may have; ENOMEM."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """The check to load; the first message. ``models_dir`` has the models of checks that need one; ``memory_bytes`` is
    what the process may need beyond what it has when it is loaded."""

    check: str
    models_dir: str
    memory_bytes: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Look at these texts, or pieces of texts. The next follows when this one is answered."""

    call_id: int
    texts: tuple[str, ...]
    context: CheckContext


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The check is loaded."""

    seconds: float


class Unavailable(msgspec.Struct, frozen=True, tag=True):
    """The check cannot be loaded; the process ends."""

    reason: str


class Found(msgspec.Struct, frozen=True, tag=True):
    """The findings of each text, or what post-processing made of it. With ``error``, the type of an exception, there
    are none: the check failed."""

    call_id: int
    answers: tuple[tuple[Finding, ...] | Processed, ...] = ()
    error: str | None = None


_ToCheck = Load | Ask
FromCheck = Ready | Unavailable | Found

to_check: "msgspec.msgpack.Decoder[_ToCheck]" = msgspec.msgpack.Decoder(_ToCheck)
"""Raises msgspec.DecodeError for bytes that are no message to a check."""

from_check: "msgspec.msgpack.Decoder[FromCheck]" = msgspec.msgpack.Decoder(FromCheck)
"""Raises msgspec.DecodeError for bytes that are no message from a check."""
