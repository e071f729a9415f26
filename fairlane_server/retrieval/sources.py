"""Files named by a path, a folder or a glob, and their names in a collection."""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from fairlane_server.retrieval.parsers import SUFFIXES, DocumentFormat, format_of
from fairlane_server.store_error import ReportableError

MOST_FILES = 200_000
_MAGIC = frozenset("*?[")
_UNKNOWN = "of no known format"
_OUTSIDE = "a link that leads out of the folder"


class SourcesError(ReportableError):
    """Nothing can be ingested from there."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to ingest. ``source`` is its path below the given folder, with ``/``; ``within`` is the resolved folder
    that it must be in, whatever links lead to it, None for anywhere."""

    source: str
    path: Path
    format: DocumentFormat
    size_bytes: int
    within: Path | None = None


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that is not ingested, or a folder that cannot be read, and the reason."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sources:
    """Files found, by name, files and links left out, and folders that cannot be read. ``whole``: exactly one folder
    was given, so that what is not in it is gone."""

    files: tuple[SourceFile, ...]
    left_out: tuple[SkippedFile, ...] = ()
    unread: tuple[SkippedFile, ...] = ()
    whole: bool = False


@dataclass(slots=True)
class _Finding:
    files: dict[str, SourceFile] = field(default_factory=dict)
    left_out: list[SkippedFile] = field(default_factory=list)
    unread: list[SkippedFile] = field(default_factory=list)
    taken: int = 0

    def take(self, source: str, path: Path, within: Path | None = None, *, given: bool = False) -> None:
        """Sort a file in. One that was ``given`` by name must be one that can be ingested."""
        try:
            found = path.stat()
        except OSError as error:
            reason = "a link that leads nowhere" if _holds(path.is_symlink) else _reason(error)
            self._refuse(source, path, reason, given=given)
            return
        kind = format_of(path)
        # Names that are not UTF-8 contain surrogates.
        if _shown(source) != source:
            self.leave_out(source, "its name is not UTF-8")
        elif not stat.S_ISREG(found.st_mode):
            self._refuse(source, path, "no regular file", given=given)
        elif kind is None:
            self._refuse(source, path, f"{_UNKNOWN} ({', '.join(SUFFIXES)})" if given else _UNKNOWN, given=given)
        elif source in self.files and not self.files[source].path.samefile(path):
            raise SourcesError(
                f"{self.files[source].path} and {path} would both be {source!r}: give the folder that holds both"
            )
        else:
            self.files[source] = SourceFile(source, path, kind, found.st_size, within)
            self.taken += 1
            if len(self.files) > MOST_FILES:
                raise SourcesError(f"more than {MOST_FILES:,} files: ingest them in parts")

    def _refuse(self, source: str, path: Path, reason: str, *, given: bool) -> None:
        if given:
            raise SourcesError(f"{_shown(str(path))}: {reason}")
        self.leave_out(source, reason)

    def leave_out(self, source: str, reason: str) -> None:
        self.left_out.append(SkippedFile(_shown(source), reason))


def find_sources(given: Sequence[str | os.PathLike[str]], *, follow_links: bool = False) -> Sources:
    """Every file of a known format that is meant, sorted by name.

    A folder is read recursively, and no folder is read twice, so that circles end. In a glob, ``**`` is any number of
    folders, and names begin at the first part with a wildcard. A hidden file is taken only if it is named.

    Links that lead out of a folder, or out of the one that a glob begins in, are left out unless ``follow_links``:
    otherwise anybody who may put a link there could have any file of this machine stored.

    Raises SourcesError: nothing was found, or two files would have one name.
    """
    if not given:
        raise SourcesError("say which files, folders or globs")
    finding = _Finding()
    paths = [Path(entry) for entry in given]
    for path in paths:
        taken, left_out = finding.taken, len(finding.left_out)
        if _holds(path.is_dir):
            _walk(path, finding, follow_links=follow_links)
        elif _MAGIC.isdisjoint(str(path)) or os.path.lexists(path):
            finding.take(path.name, path, given=True)
        else:
            _match(path, finding, follow_links=follow_links)
        if finding.taken == taken:
            shown = _shown(str(path))
            if finding.unread:
                raise SourcesError(f"{shown}: cannot be read ({finding.unread[0].reason})")
            new = len(finding.left_out) - left_out
            beside = f"; left out: {new}" if new else ""
            raise SourcesError(f"{shown}: holds no file to ingest ({', '.join(SUFFIXES)}){beside}")
    return Sources(
        files=tuple(finding.files[source] for source in sorted(finding.files)),
        left_out=tuple(sorted(finding.left_out, key=lambda left: left.source)),
        unread=tuple(sorted(finding.unread, key=lambda left: left.source)),
        whole=len(paths) == 1 and _holds(paths[0].is_dir),
    )


def _walk(root: Path, finding: _Finding, *, follow_links: bool) -> None:
    within = None if follow_links else _resolved(root)
    seen: set[tuple[int, int]] = set()
    waiting = [(root, PurePath())]
    while waiting:
        folder, below = waiting.pop()
        try:
            found = folder.stat()
            if (identity := (found.st_dev, found.st_ino)) in seen:
                finding.leave_out(below.as_posix(), "a folder that was read already")
                continue
            seen.add(identity)
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            finding.unread.append(SkippedFile(_shown(below.as_posix()), _reason(error)))
            continue
        folders: list[tuple[Path, PurePath]] = []
        for entry in entries:
            name, path = below / entry.name, folder / entry.name
            if entry.name.startswith("."):
                finding.leave_out(name.as_posix(), "hidden")
            elif _leads_out(path, within):
                finding.leave_out(name.as_posix(), _OUTSIDE)
            elif _holds(path.is_dir):
                folders.append((path, name))
            else:
                finding.take(name.as_posix(), path, within)
        # A stack: the last one put there is the first one read.
        waiting += reversed(folders)


def _match(pattern: Path, finding: _Finding, *, follow_links: bool) -> None:
    parts = pattern.parts
    plain = next(number for number, part in enumerate(parts) if not _MAGIC.isdisjoint(part))
    root, rest = Path(*parts[:plain]), Path(*parts[plain:])
    if any("**" in part and part != "**" for part in rest.parts):
        raise SourcesError(f"{pattern}: ** stands for folders, and for nothing beside them")
    within = None if follow_links else _resolved(root)
    shows_hidden = any(part.startswith(".") for part in rest.parts)
    try:
        found = sorted(set(_matches(root, PurePath(), rest.parts, finding)))
    except RecursionError:
        raise SourcesError(f"{pattern}: its folders are nested too deeply") from None
    for below in found:
        path = root / below
        if _holds(path.is_dir):
            continue
        if not shows_hidden and any(part.startswith(".") for part in below.parts):
            finding.leave_out(below.as_posix(), "hidden")
        elif within is not None and _holds(path.exists) and not _is_below(path, within):
            finding.leave_out(below.as_posix(), _OUTSIDE)
        else:
            finding.take(below.as_posix(), path, within)


def _matches(root: Path, below: PurePath, parts: Sequence[str], finding: _Finding) -> Iterator[PurePath]:
    """Matches of a glob's parts in a folder. Unlike pathlib's, it reports unreadable folders."""
    first, rest = parts[0], parts[1:]
    if _MAGIC.isdisjoint(first):
        if os.path.lexists(root / below / first):
            yield from _matches(root, below / first, rest, finding) if rest else (below / first,)
        return
    any_folders = first == "**"
    if any_folders and rest:
        yield from _matches(root, below, rest, finding)
    try:
        entries = sorted(os.scandir(root / below), key=lambda entry: entry.name)
    except (NotADirectoryError, FileNotFoundError):
        return
    except OSError as error:
        if (unread := SkippedFile(_shown(below.as_posix()), _reason(error))) not in finding.unread:
            finding.unread.append(unread)
        return
    for entry in entries:
        if any_folders:
            if _holds((root / below / entry.name).is_dir) and not entry.is_symlink():
                yield from _matches(root, below / entry.name, parts, finding)
        elif fnmatchcase(entry.name, first):
            yield from _matches(root, below / entry.name, rest, finding) if rest else (below / entry.name,)


def _leads_out(path: Path, within: Path | None) -> bool:
    """Whether the path is a link to a target outside the folder; a dangling link is handled elsewhere."""
    return within is not None and _holds(path.is_symlink) and _holds(path.exists) and not _is_below(path, within)


def _is_below(path: Path, within: Path) -> bool:
    return _resolved(path).is_relative_to(within)


def _holds(ask: Callable[[], bool]) -> bool:
    """Answer of a path query; False where it fails (name too long, no permission)."""
    try:
        return ask()
    except OSError:
        return False


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _shown(name: str) -> str:
    return name.encode(errors="replace").decode()
