"""Files that only their owner may read, and files that survive a loss of power."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO


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


@contextmanager
def new_files(*paths: Path) -> Iterator[tuple[IO[bytes], ...]]:
    """Files to be written, readable by their owner only. At the end of the block they are on the disk, and appear under
    their names, the first one last; after an error, or if the process is killed, none does.

    Raises FileExistsError for a name that there is, before the block and after it; OSError.
    """
    for path in paths:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    with ExitStack() as stack:
        drafts = [stack.enter_context(NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.")) for path in paths]
        yield tuple(draft.file for draft in drafts)
        for draft in drafts:
            draft.flush()
            os.fsync(draft.fileno())
        with ExitStack() as undone:
            for draft, path in reversed([*zip(drafts, paths, strict=True)]):
                os.link(draft.name, path)
                undone.callback(path.unlink)
            undone.pop_all()
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


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
