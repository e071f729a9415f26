"""The thread that looks for drift: it samples what was answered, judges complete blocks, and shows what it found.

State and position are in Postgres, and are written together. So any number of recorders may look, and each block counts
once. Decisions are ``fairlane_server/drift/``.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, replace

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate
from fairlane.settings import Settings
from fairlane_server.drift.figures import LANGUAGE, Figure, text_of
from fairlane_server.drift.language import language_of
from fairlane_server.drift.monitor import DriftFinding, MonitorPhase
from fairlane_server.drift.streams import DriftRules, DriftStream, OpenBlock, SampledRequest, StreamKey, strangest
from fairlane_server.postgres.connection import reason
from stream_processors.recorder.drift_store import DriftLook, DriftStore, FreshRequest, ShownFinding
from stream_processors.recorder.label_sources import WorkItemLog, WorkItemLogError
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

MOST_SAMPLES = 20
"""Requests that show a finding."""

_INTERVAL_S = 30.0
_MOST_READ = 320
"""Work items that a look reads from the log."""
_MOST_OF_WINDOW = 256
"""Requests that samples are chosen from; fewer if their text is needed."""
_MOST_TEXTS_OF_WINDOW = 64


def rules_of_drift(settings: Settings) -> DriftRules | None:
    """The rules that the settings say; None if nothing is to be watched."""
    if settings.drift_block_requests == 0:
        return None
    return DriftRules(
        settings.drift_block_requests,
        1_000 * settings.drift_block_s,
        1_000 * settings.drift_reference_s,
        settings.drift_false_alarms_per_month,
    )


class DriftWatch(Watch):
    """Looks twice a minute. ``on_failure`` is called on the thread with the error that ended it; Postgres or Kafka that
    does not answer is none."""

    def __init__(
        self,
        settings: Settings,
        rules: DriftRules,
        works: WorkItemLog,
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        super().__init__("drift-watch", _INTERVAL_S, on_failure)
        self._store = DriftStore(settings.postgres_dsn.get_secret_value())
        self._rules = rules
        self._works = works
        self._keep_ms = 1_000 * settings.drift_ttl_s
        self._wall_clock = wall_clock
        self._shown: set[tuple[str, str, str]] = set()
        self._left_to_read = 0

    def close(self) -> None:
        """Disconnect one whose thread was never started; the thread does it at its end."""
        self._works.close()
        self._store.close()

    def look(self) -> None:
        """Look once."""
        self._left_to_read = _MOST_READ
        now = self._wall_clock()
        try:
            self._store.clear(now - self._keep_ms)
            self._judge(self._store.look(now, self._rules.block_requests))
            findings, phases = self._store.shown(now)
        except psycopg.Error as error:
            log.warning("drift_not_looked_for", reason=reason(error))
            return
        self._shown = metrics.show(metrics.DRIFT_FINDINGS, findings, self._shown)
        for phase in MonitorPhase:
            metrics.DRIFT_STATISTICS.labels(phase=phase.value).set(phases.get(phase.value, 0))

    def _judge(self, look: DriftLook) -> None:
        if not look.requests:
            return
        opened: list[DriftStream] = []
        judged: list[DriftStream] = []
        due: list[DriftStream] = []
        for key, requests in _by_stream(look.requests).items():
            block = look.blocks.get(key)
            if block is None and not look.has_room:
                continue
            fresh = [_sampled(key, one) for one in requests]
            stream = DriftStream(key, block or OpenBlock()).with_requests(fresh, self._rules)
            if stream.is_due(self._rules):
                due.append(stream)
            else:
                (judged if block is None else opened).append(stream)
        monitors = self._store.monitors([one.key for one in due], look.size) if due else {}
        log_needed = self._rules.log_needed(look.watched)
        found: list[ShownFinding] = []
        for stream in due:
            known = replace(self._with_languages(stream), monitors=monitors.get(stream.key, {}))
            after, findings = known.judged(self._rules, log_needed)
            judged.append(after)
            found += [self._shown_finding(stream.key, finding) for finding in findings]
        if self._store.write(look, opened, judged, found, self._wall_clock()):
            for one in found:
                _log(one)

    def _shown_finding(self, key: StreamKey, finding: DriftFinding) -> ShownFinding:
        digest = hashlib.sha256("\0".join((*astuple(key), finding.statistic, str(finding.until_ms))).encode())
        return ShownFinding(f"drift-{digest.hexdigest()[:16]}", key, finding, self._samples(key, finding))

    def _samples(self, key: StreamKey, finding: DriftFinding) -> list[tuple[FreshRequest, float]]:
        """The requests since the change that make most of it."""
        reads_texts = finding.statistic == LANGUAGE.name
        most = _MOST_TEXTS_OF_WINDOW if reads_texts else _MOST_OF_WINDOW
        requests = self._store.window(key, finding.since_ms, finding.until_ms, most)
        figures: list[tuple[FreshRequest, Figure]] = []
        for one in requests:
            figure = self._language(one.tenant, one.work) if reads_texts else one.figures.get(finding.statistic)
            if figure is not None:
                figures.append((one, figure))
        if not figures:
            return []
        strangeness = finding.reference.strangeness([figure for _, figure in figures])
        return [(figures[place][0], strangeness[place]) for place in strangest(strangeness, MOST_SAMPLES)]

    def _with_languages(self, stream: DriftStream) -> DriftStream:
        """With the languages of some requests of its block, whose texts are in the log."""
        if LANGUAGE not in stream.key.statistics or LANGUAGE.most_of_block is None:
            return stream
        sample = list(stream.block.sample)
        left = LANGUAGE.most_of_block
        for place, one in enumerate(sample):
            if left == 0:
                break
            if (language := self._language(stream.key.tenant, one.work)) is not None:
                sample[place] = replace(one, figures={**one.figures, LANGUAGE.name: language})
                left -= 1
        return replace(stream, block=replace(stream.block, sample=tuple(sample)))

    def _language(self, tenant: str, work: SourceCoordinate | None) -> str | None:
        """Of the text at this place; None if it cannot be had."""
        if work is None or self._left_to_read == 0:
            return None
        self._left_to_read -= 1
        try:
            item = self._works.read(work)
        except WorkItemLogError as error:
            # Other statistics need no text.
            self._left_to_read = 0
            log.warning("languages_not_read", reason=str(error))
            return None
        # A topic that was made anew has other records at the same offsets.
        return language_of(text_of(item.request.input)) if item is not None and item.tenant == tenant else None


def _log(found: ShownFinding) -> None:
    log.warning(
        "drift_found",
        tenant=found.key.tenant,
        model=found.key.model,
        version=found.key.version,
        statistic=found.finding.statistic,
        effect=round(found.finding.effect, 3),
        finding=found.finding_id,
    )


def _by_stream(requests: Iterable[FreshRequest]) -> Mapping[StreamKey, list[FreshRequest]]:
    found: dict[StreamKey, list[FreshRequest]] = defaultdict(list)
    for one in requests:
        for key in one.streams:
            if key.statistics:
                found[key].append(one)
    return found


def _sampled(key: StreamKey, one: FreshRequest) -> SampledRequest:
    """What a block of this stream keeps of a request."""
    names = {statistic.name for statistic in key.statistics}
    figures = {name: value for name, value in one.figures.items() if name in names}
    return SampledRequest(one.place, one.answered_at_ms, figures, one.work if LANGUAGE.name in names else None)
