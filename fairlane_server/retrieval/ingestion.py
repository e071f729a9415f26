"""Ingestion: files into a collection; only changed files are read, split, embedded and stored.

A document's content hash stands for its bytes and for everything that its passages depend on beside them. What is
stored under the same hash is left alone: so a second run is short, and one that was interrupted goes on.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath

import numpy as np

from fairlane_server.retrieval.chunking import Chunker, Chunking, title_of
from fairlane_server.retrieval.documents.document import (
    MOST_TITLE_CHARACTERS,
    PARSER_REVISION,
    DocumentError,
    DocumentLimits,
)
from fairlane_server.retrieval.documents.reader import DocumentReader, check_size, read_file
from fairlane_server.retrieval.embedder import Embedder, TextRefusedError
from fairlane_server.retrieval.sources import LeftOut, SourceFile, Sources
from fairlane_server.retrieval.store import Collection, CollectionStore, NewDocument, NewPassage
from fairlane_server.store_error import ReportableError

Progress = Callable[[int], None]
"""Is told how many of the files are done."""
_MOST_SOURCE_BYTES = 1_024


class IngestError(ReportableError):
    """The ingest as a whole cannot be done."""


class EmbedderMismatchError(IngestError):
    """The collection's vectors were made by another embedder."""


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """About ``batch_passages`` of at most ``batch_documents`` are embedded and stored together; a document is never
    divided."""

    chunking: Chunking = field(default_factory=Chunking)
    limits: DocumentLimits = field(default_factory=DocumentLimits)
    batch_passages: int = 512
    batch_documents: int = 64


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that was not taken, and why."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Planned changes of an ingestion. ``gone`` are stored documents to remove, whose files are missing, with their
    content hashes; ``failures`` are files that cannot be read or are too large."""

    new: tuple[SourceFile, ...] = ()
    changed: tuple[SourceFile, ...] = ()
    unchanged: int = 0
    gone: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    @property
    def due(self) -> tuple[SourceFile, ...]:
        return tuple(sorted((*self.new, *self.changed), key=lambda file: file.source))


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Result of an ingestion, in documents and stored passages. What was stored of a failed file before stays; ``left``
    are files that were not read because the ingest was stopped."""

    new: int
    changed: int
    unchanged: int
    removed: int
    passages: int
    failures: tuple[Failure, ...]
    left_out: tuple[LeftOut, ...]
    left: int
    stopped: bool
    indexed: bool
    seconds: float

    @property
    def passages_per_s(self) -> float:
        return self.passages / self.seconds if self.seconds > 0 else 0.0


def check_embedder(collection: Collection, embedder: Embedder) -> None:
    """Raises EmbedderMismatchError unless the embedder is the one that made the collection's vectors."""
    if (collection.embedder, collection.dimensions) != (embedder.name, embedder.dimensions):
        raise EmbedderMismatchError(
            f"collection {collection.name} was embedded by {collection.embedder} ({collection.dimensions} dimensions), "
            f"and this embedder is {embedder.name} ({embedder.dimensions}): use that one, or create a new collection"
        )


def content_hash(data: bytes, chunking: Chunking, embedder_name: str) -> str:
    made_by = f"{PARSER_REVISION}\n{chunking.max_tokens}\n{chunking.overlap_tokens}\n{embedder_name}\n"
    return hashlib.sha256(made_by.encode() + hashlib.sha256(data).digest()).hexdigest()


class Ingestion:
    """Brings files into one collection of a tenant."""

    def __init__(
        self, store: CollectionStore, embedder: Embedder, collection: Collection, options: IngestOptions | None = None
    ) -> None:
        check_embedder(collection, embedder)
        self._store = store
        self._embedder = embedder
        self._collection = collection
        self._options = options or IngestOptions()

    def plan(self, sources: Sources, *, prune: bool = False, progress: Progress | None = None) -> Plan:
        """Compare the files with what is stored; changes nothing. ``prune`` looks for documents whose files are gone.

        Raises StoreError, and IngestError when it cannot be told what is gone.
        """
        stored = self._store.content_hashes(self._collection.tenant, self._collection.name)
        gone = _gone(sources, stored) if prune else {}
        new: list[SourceFile] = []
        changed: list[SourceFile] = []
        failures = [Failure(folder.source, f"cannot be read ({folder.reason})") for folder in sources.unread]
        unchanged = 0
        for number, file in enumerate(sources.files, 1):
            try:
                found = self._hash(self._read(file))
            except DocumentError as error:
                failures.append(Failure(error.source, error.reason))
            else:
                if file.source not in stored:
                    new.append(file)
                elif stored[file.source] != found:
                    changed.append(file)
                else:
                    unchanged += 1
            if progress is not None:
                progress(number)
        return Plan(tuple(new), tuple(changed), unchanged, gone, tuple(failures), sources.left_out)

    def run(
        self, plan: Plan, *, progress: Progress | None = None, stop: Callable[[], bool] = lambda: False
    ) -> IngestReport:
        """Carry out a plan. Stored passages stay however the run ends, and a new plan continues from there.

        ``stop`` is asked before each document; once it says so, what was read is stored and nothing else is done.
        A document whose text the embedder refuses is a failure, and the others are stored. Raises StoreError or
        EmbedderError when the store or the embedder fails, and CollectionNotFoundError when the collection was deleted,
        even if there is another of its name now.
        """
        began = time.monotonic()
        collection = self._collection
        failures = list(plan.failures)
        counts = dict.fromkeys(("new", "changed", "passages"), 0)
        is_new = {file.source for file in plan.new}
        due = plan.due
        asked = _Asked(due, stop)
        for batch in self._batches(asked, failures):
            if documents := self._embedded(batch, failures):
                self._store.put(collection.tenant, collection.name, documents, number=collection.number)
            for document in documents:
                counts["new" if document.source in is_new else "changed"] += 1
                counts["passages"] += len(document.passages)
            if progress is not None:
                progress(asked.given)
        if progress is not None:
            # The last ones may all have failed.
            progress(asked.given)
        removed, indexed = 0, False
        if not asked.stopped:
            named = (collection.tenant, collection.name)
            removed = self._store.remove(*named, plan.gone, number=collection.number) if plan.gone else 0
            indexed = self._store.build_index(*named, number=collection.number)
        return IngestReport(
            **counts,
            unchanged=plan.unchanged,
            removed=removed,
            failures=tuple(failures),
            left_out=plan.left_out,
            left=len(due) - asked.given,
            stopped=asked.stopped,
            indexed=indexed,
            seconds=time.monotonic() - began,
        )

    def _batches(self, files: Iterable[SourceFile], failures: list[Failure]) -> "Iterator[list[_Prepared]]":
        batch: list[_Prepared] = []
        chunker = Chunker(self._options.chunking)
        with DocumentReader(self._options.limits) as reader:
            for file in files:
                try:
                    batch.append(self._prepared(file, reader, chunker))
                except DocumentError as error:
                    failures.append(Failure(error.source, error.reason))
                passages = sum(len(prepared.passages) for prepared in batch)
                if passages >= self._options.batch_passages or len(batch) >= self._options.batch_documents:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _prepared(self, file: SourceFile, reader: DocumentReader, chunker: Chunker) -> "_Prepared":
        data = self._read(file)
        document = reader.parse(file.source, file.format, data)
        most = self._options.limits.max_passages
        passages = chunker.passages(document, most)
        if len(passages) > most:
            raise DocumentError(file.source, f"makes more passages than a document may ({most:,}): split it")
        if not passages:
            raise DocumentError(file.source, "holds no text")
        title = (title_of(document) or PurePath(file.source).stem)[:MOST_TITLE_CHARACTERS]
        # The hash of what was read now: the file may have changed since it was planned.
        return _Prepared(file.source, self._hash(data), title, passages)

    def _embedded(self, batch: "Sequence[_Prepared]", failures: list[Failure]) -> list[NewDocument]:
        """The batch without the documents that the embedder refuses: those are failures."""
        try:
            return self._embed(batch)
        except TextRefusedError as error:
            if len(batch) > 1:
                # Any of them may be meant.
                return [document for prepared in batch for document in self._embedded([prepared], failures)]
            failures.append(Failure(batch[0].source, str(error)))
            return []

    def _embed(self, batch: "Sequence[_Prepared]") -> list[NewDocument]:
        documents: list[NewDocument] = []
        texts = [_embedded_text(passage) for prepared in batch for passage in prepared.passages]
        # A large document is a batch by itself; its texts are still embedded in bounded parts.
        size = self._options.batch_passages
        parts = [self._embedder.embed(texts[start : start + size]) for start in range(0, len(texts), size)]
        vectors = np.concatenate(parts)
        start = 0
        for prepared in batch:
            end = start + len(prepared.passages)
            documents.append(
                NewDocument(
                    prepared.source, prepared.content_hash, prepared.title, prepared.passages, vectors[start:end]
                )
            )
            start = end
        return documents

    def _read(self, file: SourceFile) -> bytes:
        if len(file.source.encode()) > _MOST_SOURCE_BYTES:
            raise DocumentError(file.source, f"its path has more than {_MOST_SOURCE_BYTES:,} bytes")
        check_size(file.source, file.size_bytes, self._options.limits)
        return read_file(file.source, file.path, self._options.limits, file.within)

    def _hash(self, data: bytes) -> str:
        return content_hash(data, self._options.chunking, self._embedder.name)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A document that still has to be embedded."""

    source: str
    content_hash: str
    title: str
    passages: tuple[NewPassage, ...]


class _Asked:
    """The files in order, until a stop is requested."""

    def __init__(self, files: Sequence[SourceFile], stop: Callable[[], bool]) -> None:
        self._files = files
        self._stop = stop
        self.given = 0
        self.stopped = False

    def __iter__(self) -> Iterator[SourceFile]:
        for file in self._files:
            if self._stop():
                self.stopped = True
                return
            self.given += 1
            yield file


def _embedded_text(passage: NewPassage) -> str:
    return f"{passage.heading}\n{passage.text}" if passage.heading else passage.text


def _gone(sources: Sources, stored: Mapping[str, str]) -> Mapping[str, str]:
    if not sources.whole:
        raise IngestError("what is gone can be told of one folder alone: give that, or do without prune")
    if sources.unread:
        raise IngestError(
            f"what is gone cannot be told: {sources.unread[0].source} cannot be read ({sources.unread[0].reason})"
        )
    there = {file.source for file in sources.files} | {left.source for left in sources.left_out}
    return {source: stored[source] for source in sorted(stored.keys() - there) if not _is_below(source, there)}


def _is_below(source: str, there: Set[str]) -> bool:
    """Whether the file is below an excluded folder."""
    return any(parent.as_posix() in there for parent in PurePosixPath(source).parents)
