"""Files that only their owner may read, and files that survive a loss of power."""

import os
from pathlib import Path


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Write ``text`` to ``path`` in one step, readable by its owner only. ``durable``: it is on the disk on return."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)
    if durable:
        sync_folder(path.parent)


def read_private(path: Path) -> str:
    """What is in the file. Raises OSError, and ValueError where others can open it."""
    with path.open(encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(f"{path}: must belong to the user of this process, and be readable by nobody else")
        return file.read()


def sync_folder(folder: Path) -> None:
    """Make what was renamed in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
