"""Core files, which would hold prompts, answers and passwords."""

import resource


def no_core_file() -> None:
    """Leave none of this process and of those that it starts. A program that the kernel gives cores to
    (``core_pattern``) is told the limit."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
