"""The author that commands record with their changes."""

import os
from contextlib import suppress
from getpass import getuser
from platform import node


def command_author() -> str:
    """User and machine of a command."""
    user = f"uid {os.getuid()}"
    # A container may have no user with this uid.
    with suppress(KeyError, OSError, ImportError):
        user = getuser()
    return f"{user}@{node()}"
