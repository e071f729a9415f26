"""Ingestion: files into a collection; only changed files are read, split, embedded and stored.

A document's content hash covers its bytes and everything else that its passages depend on. What is
stored under the same hash is left alone: so a second run is short, and one that was interrupted goes on.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath, PurePosixPath

import numpy as np

from fairlane_server.retrieval.chunking import Chunker, Chunking, title_of
from fairlane_server.retrieval.documents import DocumentError, DocumentReader, check_size, read_file
from fairlane_server.retrieval.embedder import Embedder, TextRefusedError
from fairlane_server.retrieval.parsers import (
    MOST_TITLE_CHARACTERS,
    PARSER_REVISION,
    DocumentLimits,
    UnreadableError,
)
from fairlane_server.retrieval.sources import SkippedFile, SourceFile, Sources
from fairlane_server.retrieval.store import Collection, CollectionStore, NewDocument, NewPassage
from fairlane_server.store_error import ReportableError

_MOST_SOURCE_BYTES = 1_024
_NO_VECTORS = np.zeros((0, 0), dtype=np.float32)
"""Of a document that is not embedded yet."""


def _ignore(_done: int) -> None: ...


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
class Plan:
    """Planned changes of an ingestion. ``gone`` are stored documents to remove, whose files are missing, with their
    content hashes; ``failures`` are files that cannot be read or are too large."""

    new: tuple[SourceFile, ...] = ()
    changed: tuple[SourceFile, ...] = ()
    unchanged: int = 0
    gone: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[SkippedFile, ...] = ()
    left_out: tuple[SkippedFile, ...] = ()

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
    failures: tuple[SkippedFile, ...]
    left_out: tuple[SkippedFile, ...]
    left: int
    stopped: bool
    indexed: bool
    seconds: float

    @property
    def passages_per_s(self) -> float:
        return self.passages / self.seconds if self.seconds > 0 else 0.0


def content_hash(data: bytes, chunking: Chunking, embedder_name: str) -> str:
    made_by = f"{PARSER_REVISION}\n{chunking.max_tokens}\n{chunking.overlap_tokens}\n{embedder_name}\n"
    return hashlib.sha256(made_by.encode() + hashlib.sha256(data).digest()).hexdigest()


def embedded_texts(passages: Iterable[NewPassage]) -> list[str]:
    """The texts whose vectors are those of the passages: each with the headings above it."""
    return [f"{passage.heading}\n{passage.text}" if passage.heading else passage.text for passage in passages]


def check_embedder(collection: Collection, embedder: Embedder) -> None:
    """Raises EmbedderMismatchError if the collection has vectors of another embedder."""
    if (collection.embedder, collection.dimensions) != (embedder.name, embedder.dimensions):
        raise EmbedderMismatchError(
            f"collection {collection.name} was embedded by {collection.embedder} ({collection.dimensions} "
            f"dimensions), and this embedder is {embedder.name} ({embedder.dimensions}): use that one, or create a "
            "new collection"
        )


class Ingestion:
    """Brings files into one collection of a tenant. Raises EmbedderMismatchError for another embedder than its own."""

    def __init__(
        self, store: CollectionStore, embedder: Embedder, collection: Collection, options: IngestOptions | None = None
    ) -> None:
        check_embedder(collection, embedder)
        self._store = store
        self._embedder = embedder
        self._collection = collection
        self._options = options or IngestOptions()

    def plan(self, sources: Sources, *, prune: bool = False, progress: Callable[[int], None] = _ignore) -> Plan:
        """Compare the files with what is stored; changes nothing. ``prune`` looks for documents whose files are gone;
        ``progress`` is called with the number of files that are done.

        Raises StoreError, and IngestError when the missing files cannot be determined.
        """
        stored = self._store.content_hashes(self._collection.tenant, self._collection.name)
        gone = _gone(sources, stored) if prune else {}
        new: list[SourceFile] = []
        changed: list[SourceFile] = []
        failures = [SkippedFile(folder.source, f"cannot be read ({folder.reason})") for folder in sources.unread]
        unchanged = 0
        for number, file in enumerate(sources.files, 1):
            try:
                found = self._hash(self._read(file))
            except DocumentError as error:
                failures.append(SkippedFile(error.source, error.reason))
            else:
                if file.source not in stored:
                    new.append(file)
                elif stored[file.source] != found:
                    changed.append(file)
                else:
                    unchanged += 1
            progress(number)
        return Plan(tuple(new), tuple(changed), unchanged, gone, tuple(failures), sources.left_out)

    def run(
        self, plan: Plan, *, progress: Callable[[int], None] = _ignore, stop: Callable[[], bool] = lambda: False
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
        given, stopped = 0, False

        def files() -> Iterator[SourceFile]:
            nonlocal given, stopped
            for file in due:
                if stop():
                    stopped = True
                    return
                given += 1
                yield file

        for batch in self._batches(files(), failures):
            if documents := self._embedded(batch, failures):
                self._store.put(collection.tenant, collection.name, documents, number=collection.number)
            for document in documents:
                counts["new" if document.source in is_new else "changed"] += 1
                counts["passages"] += len(document.passages)
            progress(given)
        # The last ones may all have failed.
        progress(given)
        removed, indexed = 0, False
        if not stopped:
            named = (collection.tenant, collection.name)
            removed = self._store.remove(*named, plan.gone, number=collection.number) if plan.gone else 0
            indexed = self._store.build_index(*named, number=collection.number)
        return IngestReport(
            **counts,
            unchanged=plan.unchanged,
            removed=removed,
            failures=tuple(failures),
            left_out=plan.left_out,
            left=len(due) - given,
            stopped=stopped,
            indexed=indexed,
            seconds=time.monotonic() - began,
        )

    def _batches(self, files: Iterable[SourceFile], failures: list[SkippedFile]) -> Iterator[list[NewDocument]]:
        batch: list[NewDocument] = []
        chunker = Chunker(self._options.chunking)
        with DocumentReader(self._options.limits) as reader:
            for file in files:
                try:
                    batch.append(self._prepared(file, reader, chunker))
                except DocumentError as error:
                    failures.append(SkippedFile(error.source, error.reason))
                passages = sum(len(document.passages) for document in batch)
                if passages >= self._options.batch_passages or len(batch) >= self._options.batch_documents:
                    yield batch
                    batch = []
        if batch:
            yield batch

    def _prepared(self, file: SourceFile, reader: DocumentReader, chunker: Chunker) -> NewDocument:
        data = self._read(file)
        document = reader.parse(file.source, file.format, data)
        try:
            passages = chunker.passages_within(document, self._options.limits)
        except UnreadableError as error:
            raise DocumentError(file.source, str(error)) from None
        if not passages:
            raise DocumentError(file.source, "holds no text")
        title = (title_of(document) or PurePath(file.source).stem)[:MOST_TITLE_CHARACTERS]
        # The hash of what was read now: the file may have changed since it was planned.
        return NewDocument(file.source, self._hash(data), title, passages, _NO_VECTORS, len(data))

    def _embedded(self, batch: Sequence[NewDocument], failures: list[SkippedFile]) -> list[NewDocument]:
        """The batch without the documents that the embedder refuses: those are failures."""
        try:
            return self._embed(batch)
        except TextRefusedError as error:
            if len(batch) > 1:
                # Any of them may be meant.
                return [embedded for document in batch for embedded in self._embedded([document], failures)]
            failures.append(SkippedFile(batch[0].source, str(error)))
            return []

    def _embed(self, batch: Sequence[NewDocument]) -> list[NewDocument]:
        texts = [text for document in batch for text in embedded_texts(document.passages)]
        # A large document is a batch by itself; its texts are still embedded in bounded parts.
        size = self._options.batch_passages
        parts = [self._embedder.embed(texts[start : start + size]) for start in range(0, len(texts), size)]
        ends = np.cumsum([len(document.passages) for document in batch])
        vectors = np.split(np.concatenate(parts), ends[:-1])
        return [replace(document, vectors=part) for document, part in zip(batch, vectors, strict=True)]

    def _read(self, file: SourceFile) -> bytes:
        if len(file.source.encode()) > _MOST_SOURCE_BYTES:
            raise DocumentError(file.source, f"its path has more than {_MOST_SOURCE_BYTES:,} bytes")
        check_size(file.source, file.size_bytes, self._options.limits)
        return read_file(file.source, file.path, self._options.limits, file.within)

    def _hash(self, data: bytes) -> str:
        return content_hash(data, self._options.chunking, self._embedder.name)


def _gone(sources: Sources, stored: Mapping[str, str]) -> Mapping[str, str]:
    if not sources.whole:
        raise IngestError("what is gone can be told of one folder alone: give that, or do without prune")
    if sources.unread:
        raise IngestError(
            f"what is gone cannot be told: {sources.unread[0].source} cannot be read ({sources.unread[0].reason})"
        )
    there = {file.source for file in sources.files} | {left.source for left in sources.left_out}

    def is_there(source: str) -> bool:
        """Whether the file was found, or is below a folder that was left out."""
        return source in there or any(parent.as_posix() in there for parent in PurePosixPath(source).parents)

    return {source: stored[source] for source in sorted(stored) if not is_there(source)}
