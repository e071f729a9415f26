"""Takes waiting uploads, a few at a time, a thread for each lane; keeps their leases; deletes content of no use."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from queue import SimpleQueue
from time import monotonic

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.processes.service import Readiness, StopSignal
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import blob_of, file_url
from producers.ingest.ingester import Ingester
from producers.ingest.turns import WaitingUpload, next_uploads
from producers.ingest.work_store import Upload, WorkStore

log = get_logger(__name__)

POSTGRES = "postgres"
CONDITIONS = (POSTGRES,)

LEASE_S = 30.0
_STEP_S, _BUSY_STEP_S = 0.2, 0.05
_LOOK_S = 1.0
_KEEP_S = 5.0
_SWEEP_S = 10.0
_MOST_SWEPT = 500


@dataclass(slots=True)
class _Run:
    """An upload that is ingested here."""

    upload: Upload
    lane: "_Lane"
    lost: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)


class _Lane:
    """A thread that ingests one upload after another. It outlives them: the kernel ends the parser process with the
    thread that started it."""

    def __init__(self, ingester: Ingester, number: int) -> None:
        self._ingester = ingester
        self._given: SimpleQueue[_Run | None] = SimpleQueue()
        # A daemon: a document that hangs must not keep the process from ending. Its lease ends.
        self._thread = threading.Thread(target=self._work, name=f"ingest-{number}", daemon=True)
        self._thread.start()

    def give(self, run: _Run) -> None:
        """An upload, when the one before is over."""
        self._given.put(run)

    def close(self, timeout_s: float) -> bool:
        """End behind the current upload. Returns whether it did in time."""
        self._given.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with self._ingester:
            while (run := self._given.get()) is not None:
                try:
                    self._ingest(run)
                finally:
                    run.over.set()

    def _ingest(self, run: _Run) -> None:
        upload, outcome = run.upload, "lost"
        try:
            outcome = self._ingester.ingest(upload, run.lost.is_set)
        except (UnavailableError, JobFailedError) as error:
            log.warning("document_outcome_unknown", upload=upload.upload_id, tenant=upload.tenant, reason=str(error))
        except Exception as error:  # noqa: BLE001 - the others go on
            # Not its text, which may quote the document.
            log.error("document_broke", upload=upload.upload_id, tenant=upload.tenant, error=type(error).__name__)
        metrics.INGESTED_DOCUMENTS.labels(outcome).inc()
        log.info("document_ended", upload=upload.upload_id, tenant=upload.tenant, outcome=outcome)


@dataclass(slots=True)
class IngestService:
    """For one thread.

    Attributes:
        store: of this thread.
        lanes: as many uploads are ingested at a time.
        stop: leaves every upload when set, to be ingested by another process.
        leave_s: how long to wait at the end until every upload is left.
    """

    store: WorkStore
    lanes: list[Ingester]
    files_url: str
    stop: StopSignal
    readiness: Readiness
    _: KW_ONLY
    lease_s: float = LEASE_S
    leave_s: float = 25.0
    clock: Callable[[], float] = monotonic
    _runs: dict[str, _Run] = field(default_factory=dict, init=False)
    _lanes: list[_Lane] = field(default_factory=list, init=False)
    _free: list[_Lane] = field(default_factory=list, init=False)
    _turns: Iterator[int] = field(default_factory=count, init=False)
    _last_turn: dict[str, int] = field(default_factory=dict, init=False)
    _due: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._lanes = [_Lane(ingester, number) for number, ingester in enumerate(self.lanes)]
        self._free = list(self._lanes)

    def run(self) -> None:
        """Ingest until stopped; returns when all uploads are left, or the time for that is over."""
        try:
            while not self.stop.stopping:
                self.step()
                self.stop.wait(_BUSY_STEP_S if self._runs else _STEP_S)
        finally:
            self.readiness.set(POSTGRES, "stopping")
            self._leave_all()
            self.store.close()

    def step(self) -> None:
        """One round: collect what is over, keep leases, start others, delete content."""
        has_room = self._collect()
        try:
            if self._is_due("keep", _KEEP_S):
                self._keep()
            # At once when a lane is free: a queue of small documents must not wait for the next look.
            if self._is_due("look", _LOOK_S) or has_room:
                self._take()
                self.readiness.set(POSTGRES)
            if self._is_due("sweep", _SWEEP_S):
                self.sweep()
        except (UnavailableError, JobFailedError) as error:
            self.readiness.set(POSTGRES, str(error))
            log.warning("uploads_not_seen", reason=str(error))

    def _is_due(self, what: str, every_s: float) -> bool:
        now_s = self.clock()
        if now_s < self._due.get(what, float("-inf")):
            return False
        self._due[what] = now_s + every_s
        return True

    def _collect(self) -> bool:
        over = [run for run in self._runs.values() if run.over.is_set()]
        for run in over:
            del self._runs[run.upload.upload_id]
            self._free.append(run.lane)
        return bool(over)

    def _keep(self) -> None:
        held = {run.upload.upload_id: run.upload.token for run in self._runs.values()}
        kept = self.store.keep(held, self.lease_s) if held else set()
        for upload_id in held.keys() - kept:
            # Deleted, replaced by a newer version, or taken by another process.
            self._runs[upload_id].lost.set()

    def _take(self) -> None:
        if not self._free:
            return
        waiting = self.store.waiting()
        running = [run.upload.tenant for run in self._runs.values()]
        for upload in next_uploads(waiting, running, self._last_turn, len(self.lanes)):
            self._start(upload)
        states = self.store.counted()
        for state in ("pending", "running"):
            metrics.INGEST_DOCUMENTS.labels(state).set(states.get(state, 0))

    def _start(self, waiting: WaitingUpload) -> None:
        self._last_turn[waiting.tenant] = next(self._turns)
        upload = self.store.take(waiting, self.lease_s)
        if upload is None:
            return
        run = self._runs[upload.upload_id] = _Run(upload, self._free.pop())
        run.lane.give(run)

    def sweep(self) -> int:
        """Delete content that is of no use any more. Returns of how many uploads."""
        deleted = 0
        for upload_id, tenant, stays in self.store.left_content(_MOST_SWEPT):
            try:
                # The row goes after its content: no content is stored without a row that names it.
                blob_of(file_url(self.files_url, tenant, upload_id)).delete()
            except (UnavailableError, JobFailedError) as error:
                log.warning("content_not_deleted", tenant=tenant, upload=upload_id, reason=str(error))
                continue
            self.store.content_deleted(upload_id, stays=stays)
            deleted += 1
        return deleted

    def _leave_all(self) -> None:
        left_at = monotonic() + self.leave_s
        ended = [lane.close(max(0.0, left_at - monotonic())) for lane in self._lanes]
        if not all(ended):
            held = [upload_id for upload_id, run in self._runs.items() if not run.over.is_set()]
            log.warning("uploads_not_left", uploads=held)
