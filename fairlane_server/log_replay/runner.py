"""The thread that carries out replays of the log.

It keeps nothing: plans and states are in Postgres, and how far each replay is, with its counts, in the offsets that are
committed with its copies. So it may be ended at any time. Of several processes one leads; two that both believe so
fence each other in Kafka, and copy nothing twice.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane_server.control.published_models import FollowedModels
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.log_replay.copier import MAX_AGE_MS, ProgressLostError, ReplayCopier
from fairlane_server.log_replay.journal import CopyResults, ReplayJournal
from fairlane_server.log_replay.pace import OutstandingCopies, RecentRate
from fairlane_server.log_replay.plan import ARMS, MOST_OUTSTANDING, LogReplayState
from fairlane_server.log_replay.progress import expected_requests, remaining_s
from fairlane_server.log_replay.ranges import topics_of
from fairlane_server.log_replay.report import ReportBuilder
from fairlane_server.log_replay.selection import room
from fairlane_server.log_replay.store import LogReplay, ReplayProgress
from fairlane_server.log_replay.verdict import ReplayReport
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.postgres.connection import DsnError, reason
from fairlane_server.postgres.leadership import Leadership
from fairlane_server.processes.watchdog import Watchdog
from fairlane_server.store_error import StoreError

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-log-replay-leader"
LEADER_LOCK = 4_170_120_032

_INTERVAL_S = 1.0
_MOST_BUSY = 0.1
"""Part of the time that counting results may keep Postgres busy."""
_LONGEST_PAUSE_S = 30.0
_FORGET_EVERY_S = 60.0
_PAIRS_PER_STEP = 400
_HANG_LIMIT_S = 120.0
_STOP_TIMEOUT_S = 20.0
_TROUBLES = (ClusterError, RegistryError, StoreError, FeedUnavailableError)


@dataclass(slots=True)
class _Active:
    """A replay that this process carries out."""

    replay: LogReplay
    copier: ReplayCopier
    copies: OutstandingCopies = field(default_factory=OutstandingCopies)
    results: CopyResults = field(default_factory=lambda: CopyResults({}, {}, {}))
    rate: RecentRate = field(default_factory=RecentRate)
    count_at_s: float = 0.0
    copied_at_s: float = 0.0
    """When it copied last."""
    builder: ReportBuilder | None = None
    """Once all results are there."""


@dataclass(slots=True)
class _Trouble:
    """A replay, or what all need, that cannot go on now."""

    why: str
    failures: int = 1
    again_at_s: float = 0.0


class LogReplayRunner:
    """Looks once a second, and without a pause while there is something to copy. ``on_failure`` is called on its thread
    with the error that ended it; Kafka or Postgres that cannot be reached is none."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._on_failure = on_failure
        self._wall_clock = wall_clock
        dsn = settings.postgres_dsn.get_secret_value()
        self._leadership = Leadership(dsn, APPLICATION_NAME, LEADER_LOCK)
        self._journal = ReplayJournal(dsn)
        self._models = FollowedModels(settings, codec)
        self._active: dict[str, _Active] = {}
        self._troubled: dict[str, _Trouble] = {}
        """By replay; "" is what all need."""
        self._forget_at_s = 0.0
        self._watchdog = Watchdog(_HANG_LIMIT_S, self._hung)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-replays", daemon=True)

    def start(self) -> None:
        self._watchdog.start()
        self._thread.start()

    def stop(self) -> None:
        """End it, after the step that is under way. A replay goes on where it is, in this or another process."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        self._watchdog.stop()

    def _hung(self, call: str) -> None:
        self._on_failure(RuntimeError(f"{call} has not returned within {_HANG_LIMIT_S:g} s"))

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._look():
                    self._stopping.wait(_INTERVAL_S)
        except Exception as error:  # noqa: BLE001 - handed to the owner
            self._on_failure(error)
        finally:
            self._let_go()
            self._models.stop()
            self._journal.close()

    def _look(self) -> bool:
        """One step of every open replay. Returns whether there is more to do at once."""
        try:
            if not self._leadership.holds():
                self._let_go()
                return False
            replays = self._journal.open()
            self._forget_old()
        except (psycopg.Error, DsnError, StoreError) as error:
            self._fails("", f"Postgres: {reason(error)}" if isinstance(error, psycopg.Error) else str(error))
            return False
        try:
            catalog = self._models.catalog()
        except FeedUnavailableError as error:
            self._fails("", f"Kafka: {error}")
            return False
        self._recovers("")
        open_ones = {one.replay for one in replays}
        for gone in self._active.keys() - open_ones:
            self._close(gone)
        for gone in self._troubled.keys() - open_ones - {""}:
            del self._troubled[gone]
        metrics.LOG_REPLAYS_OPEN.set(len(replays))
        # Every one has its step, whatever the others have.
        steps = [self._stepped(one, catalog) for one in replays if not self._stopping.is_set()]
        return any(steps)

    def _stepped(self, replay: LogReplay, catalog: ModelCatalog) -> bool:
        """One step of a replay; one that cannot go on keeps no other from it. Returns whether it may go on at once."""
        trouble = self._troubled.get(replay.replay)
        if trouble is not None and monotonic() < trouble.again_at_s:
            return False
        try:
            return self._step(replay, catalog)
        except _TROUBLES as error:
            self._fails(replay.replay, str(error))
        except Exception as error:
            log.exception("log_replay_step_failed", replay=replay.replay)
            self._fails(replay.replay, type(error).__name__)
        self._close(replay.replay)
        self._note_trouble(replay)
        return False

    def _step(self, replay: LogReplay, catalog: ModelCatalog) -> bool:
        if (why := _unusable(replay, catalog)) is not None:
            return self._end(replay, LogReplayState.FAILED, why)
        active = self._active.get(replay.replay)
        if active is None:
            try:
                active = self._begun(replay, catalog)
            except ProgressLostError as error:
                return self._end(replay, LogReplayState.FAILED, f"its progress is lost: {error}")
        copier = active.copier
        if monotonic() >= active.count_at_s:
            self._count(active)
        copied = copier.counts.copied
        outstanding = active.copies.of(copied)
        # Dispatchers hold a bounded number of copies, those of shadows too.
        part = max(ARMS, MOST_OUTSTANDING // max(1, len(self._active)))
        free = room(outstanding, min(replay.most_outstanding, part), copied, replay.most_requests, ARMS)
        dealt_with = copier.step(free, self._wall_clock()) if free and not copier.is_read else 0
        new = copier.counts.copied - copied
        if new:
            metrics.LOG_REPLAY_COPIES.labels(model=replay.model).inc(ARMS * new)
            active.copied_at_s = monotonic()
        self._recovers(replay.replay)
        if not copier.is_read and copier.counts.copied != replay.most_requests:
            return dealt_with > 0
        if active.builder is None:
            left = active.copies.of(copier.counts.copied)
            if left and monotonic() - active.copied_at_s < _RESULTS_TIMEOUT_S:
                return False
            active.builder = ReportBuilder(self._journal.labels(replay))
        return self._judged(active, active.builder)

    def _judged(self, active: _Active, builder: ReportBuilder) -> bool:
        """Read some more results, and end the replay with its report when there are no more."""
        pairs = self._journal.pairs(active.replay, builder.place, _PAIRS_PER_STEP)
        builder.add(pairs)
        if len(pairs) == _PAIRS_PER_STEP:
            return True
        missing = active.copies.of(active.copier.counts.copied)
        why = f"{missing} copies have no result" if missing else None
        return self._end(active.replay, LogReplayState.FINISHED, why, builder.report())

    def _begun(self, replay: LogReplay, catalog: ModelCatalog) -> _Active:
        copier = ReplayCopier(self._settings, self._codec, replay, self._journal, self._watchdog)
        try:
            ranges = replay.ranges
            if ranges is None:
                ranges = tuple(copier.find(topics_of(catalog.versions[replay.model, replay.against])))
                self._journal.begin(replay, ranges, self._wall_clock())
            elif replay.state is LogReplayState.PLANNED:
                self._journal.begin(replay, ranges, self._wall_clock())
            copier.start(ranges)
        except BaseException:
            copier.close()
            raise
        log.info("log_replay_runs", replay=replay.replay, model=replay.model, partitions=len(ranges))
        active = self._active[replay.replay] = _Active(replay, copier, copied_at_s=monotonic())
        return active

    def _count(self, active: _Active) -> None:
        """Count the results, and record how far the replay is."""
        began_s, copied = monotonic(), active.copier.counts.copied
        active.results = self._journal.results(active.replay)
        active.copies.seen(active.results.total, monotonic())
        if active.copies.is_to_be_counted(copied, monotonic()):
            active.copies.counted(copied, self._journal.missing(active.replay), monotonic())
        active.rate.mark(active.results.total // ARMS, monotonic())
        self._journal.note(active.replay, self._progress(active), None)
        took_s = monotonic() - began_s
        active.count_at_s = monotonic() + max(_INTERVAL_S, took_s / _MOST_BUSY - took_s)

    def _progress(self, active: _Active) -> ReplayProgress:
        copier, results = active.copier, active.results
        done, whole, counts = copier.done_offsets, copier.all_offsets, copier.counts
        expected = expected_requests(counts, done, whole, active.replay.most_requests)
        return ReplayProgress(
            counts=counts,
            done_offsets=done,
            all_offsets=whole,
            answered=results.answered,
            failed=results.failed,
            dropped=results.dropped,
            per_s=active.rate.per_s,
            remaining_s=remaining_s(expected, results.total / ARMS, active.rate.per_s),
            at_ms=self._wall_clock(),
        )

    def _end(
        self, replay: LogReplay, state: LogReplayState, why: str | None, report: ReplayReport | None = None
    ) -> bool:
        active = self._active.get(replay.replay)
        if active is not None:
            self._journal.note(replay, self._progress(active), None)
        self._journal.end(replay, state, why, report, self._wall_clock())
        self._close(replay.replay)
        verdict = None if report is None else report.verdict
        log.info("log_replay_ended", replay=replay.replay, state=state, reason=why, verdict=verdict)
        return False

    def _forget_old(self) -> None:
        if monotonic() < self._forget_at_s:
            return
        now = self._wall_clock()
        results_before_ms = now - 1_000 * self._settings.results_ttl_s
        replays_before_ms = now - 1_000 * self._settings.audit_ttl_s
        is_more = self._journal.forget(results_before_ms, min(results_before_ms, replays_before_ms))
        self._forget_at_s = monotonic() + (_INTERVAL_S if is_more else _FORGET_EVERY_S)

    def _let_go(self) -> None:
        """Carry out nothing any more: another process leads, or this one ends."""
        metrics.LOG_REPLAYS_OPEN.set(0)
        for replay in list(self._active):
            self._close(replay)
        if self._stopping.is_set():
            self._leadership.release()

    def _close(self, replay: str) -> None:
        active = self._active.pop(replay, None)
        if active is not None:
            active.copier.close()

    def _note_trouble(self, replay: LogReplay) -> None:
        try:
            self._journal.note(replay, replay.progress, self._troubled[replay.replay].why)
        except StoreError:
            # It is logged, and Postgres has it once it is back.
            return

    def _fails(self, name: str, why: str) -> None:
        trouble = self._troubled.get(name)
        if trouble is None:
            trouble = self._troubled[name] = _Trouble(why, failures=0)
            log.warning("log_replay_waits", replay=name or None, reason=why)
        trouble.why = why
        trouble.failures += 1
        trouble.again_at_s = monotonic() + min(_LONGEST_PAUSE_S, _INTERVAL_S * 2 ** min(10, trouble.failures - 1))
        if not name:
            self._let_go()

    def _recovers(self, name: str) -> None:
        if self._troubled.pop(name, None) is not None:
            log.info("log_replay_goes_on", replay=name or None)


_RESULTS_TIMEOUT_S = MAX_AGE_MS / 1_000 + 1_800.0
"""After its last copy a replay waits so long for results: by then every copy has run, or was dropped."""


def _unusable(replay: LogReplay, catalog: ModelCatalog) -> str | None:
    """Why a replay cannot go on with what is published. Copies for a version that is stopped would all fail."""
    for version in (replay.candidate, replay.against):
        found = catalog.versions.get((replay.model, version))
        if found is None:
            return f"version {version} of {replay.model} was withdrawn"
        if catalog.is_stopped(found):
            return f"version {version} of {replay.model} was stopped"
    return None
