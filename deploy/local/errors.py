"""Errors of the embedded stack, each a sentence that can be shown to a person as it is."""


class StackError(Exception):
    """The stack cannot start or go on; the message says why and what to do."""


class AlreadyRunningError(StackError):
    """Another supervisor holds this data directory."""
