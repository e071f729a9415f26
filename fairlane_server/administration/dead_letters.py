"""Dead letters for the admin API: pages of them, one with or without payload, replays, purges; all bounded in time."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.records import SourceCoordinate
from fairlane.settings import Settings
from fairlane_server.administration.events import AdminAudit, AdminEvent, AdminEventKind
from fairlane_server.administration.recorded_change import recorded_change
from fairlane_server.api_keys.api_key import DEPLOYMENT
from fairlane_server.dead_letters.bulk import (
    REPLAYED,
    SELECTED,
    TOPICS,
    Cut,
    DeadLetters,
    ReplayResult,
    cut_of,
    due_letters,
    replay_letter,
    surveys_of,
    topics_of,
)
from fairlane_server.dead_letters.describe import contents, facts
from fairlane_server.dead_letters.letters import Letter, ReplayMark
from fairlane_server.dead_letters.log import DeadLetterReader, PartitionRange
from fairlane_server.dead_letters.replay import Replayer
from fairlane_server.dead_letters.selection import OffsetRange, Selection
from fairlane_server.store_error import ReportableError

MOST_READ_OF_PAGE = 10_000
LONGEST_PAGE_S = 10.0
LONGEST_SURVEY_S = 60.0
LONGEST_REPLAY_S = 60.0

Place = tuple[str, int, int]
"""A topic, a partition and an offset."""


class TooMuchError(ReportableError):
    """The call would take too long; the command line has no such bound."""


@dataclass(slots=True)
class LetterPage:
    """Letters in the order of topic, partition and offset.

    Attributes:
        letters: as ``facts`` describes them, with ``replayed_as``, the ids of the replays that were seen behind them.
        following: where the next page begins; None at the end.
    """

    letters: list[dict[str, Any]] = field(default_factory=list)
    following: Place | None = None


@dataclass(frozen=True, slots=True)
class ReplayWish:
    """What to replay: at most ``limit`` letters; ``again`` includes those replayed before."""

    topic: DeadLetters | None
    partition: int | None
    selection: Selection
    limit: int
    again: bool


@dataclass(slots=True)
class ReplayReport:
    """What became of the letters. ``left`` are due and were not reached."""

    results: list[ReplayResult] = field(default_factory=list)
    replayed_before: int = 0
    left: int = 0


class DeadLetterOffice:
    """The dead letters of all tenants. Each call connects anew; for one thread at a time."""

    def __init__(self, settings: Settings, codec: Codec, audit: AdminAudit) -> None:
        self._settings = settings
        self._codec = codec
        self._audit = audit

    def page(self, topic: DeadLetters | None, selection: Selection, since: Place | None, limit: int) -> LetterPage:
        """At most ``limit`` letters from ``since`` on, in ``MOST_READ_OF_PAGE`` records. Raises ClusterError."""
        page, rows = LetterPage(), dict[SourceCoordinate, dict[str, Any]]()
        deadline, read = time.monotonic() + LONGEST_PAGE_S, 0
        with DeadLetterReader(self._settings, self._codec) as log:
            for stretch in log.stretches(topics_of(topic), since_ms=selection.since_ms):
                rest = _from(stretch, since)
                for offset, found in log.read(rest) if rest is not None else ():
                    if page.following is None and (len(rows) >= limit and _is_wanted(found, selection)):
                        page.following = (stretch.topic, stretch.partition, offset)
                    if read >= MOST_READ_OF_PAGE or time.monotonic() > deadline:
                        page.following = page.following or (stretch.topic, stretch.partition, offset)
                        return page
                    read += 1
                    if isinstance(found, ReplayMark):
                        if (row := rows.get(found.letter)) is not None:
                            row["replayed_as"].append(found.request_id)
                    elif page.following is None and selection.takes(found):
                        rows[found.place] = {**facts(found), "replayed_as": []}
                        page.letters.append(rows[found.place])
                if page.following is not None:
                    break
        return page

    def letter(self, place: SourceCoordinate) -> dict[str, Any] | None:
        """One letter with its headers, without text of the tenant; None if there is none. Raises ClusterError."""
        found = self._find(place)
        return None if found is None else _described(found, with_input=False)

    def payload(self, place: SourceCoordinate, author: str) -> dict[str, Any] | None:
        """One letter with everything in it. That it was read is recorded first. Raises ClusterError, AuditError."""
        found = self._find(place)
        if found is None:
            return None
        details = {"topic": place.topic, "partition": place.partition, "offset": place.offset}
        kind, tenant = AdminEventKind.DEAD_LETTER_PAYLOAD_READ, found.tenant or DEPLOYMENT
        self._audit.note(AdminEvent(kind, tenant, author, details=details))
        return _described(found, with_input=True)

    def replay(self, wish: ReplayWish, author: str, *, dry_run: bool) -> ReplayReport:
        """Send what is due, or only look. Raises ClusterError when it cannot go on, TooMuchError, AuditError."""
        if dry_run:
            with DeadLetterReader(self._settings, self._codec) as log:
                return self._replayed(log, None, wish)
        details = {**_plain(wish.selection), "topic": wish.topic, "limit": wish.limit, "again": wish.again}
        tenant = wish.selection.tenant or DEPLOYMENT
        change = AdminEvent(AdminEventKind.DEAD_LETTERS_REPLAYED, tenant, author, details=details)
        with (
            recorded_change(self._audit, change) as ended,
            DeadLetterReader(self._settings, self._codec) as log,
            Replayer(self._settings, self._codec, author, now_ms) as replayer,
        ):
            report = self._replayed(log, replayer, wish)
            ended |= {"replayed": sum(one.result == "replayed" for one in report.results), "left": report.left}
        return report

    def purge(
        self,
        topic: DeadLetters,
        partition: int | None,
        until_ms: int | None,
        last: int | None,
        author: str,
        *,
        dry_run: bool,
    ) -> list[Cut]:
        """Delete the oldest letters, before a time or up to an offset. Raises as ``replay``."""
        with DeadLetterReader(self._settings, self._codec) as log:
            stretches = log.stretches(topics_of(topic), partition=partition)
            read = _TimedRead(log)
            cuts = [cut for one in stretches if (cut := cut_of(log, one, until_ms, last, read)).before_offset]
            if dry_run or not cuts:
                return cuts
            details = {"topic": TOPICS[topic], "cuts": list(map(asdict, cuts))}
            change = AdminEvent(AdminEventKind.DEAD_LETTERS_PURGED, DEPLOYMENT, author, details=details)
            with recorded_change(self._audit, change):
                for cut in cuts:
                    log.delete_before(cut.topic, cut.partition, cut.before_offset)
        return cuts

    def _find(self, place: SourceCoordinate) -> Letter | None:
        with DeadLetterReader(self._settings, self._codec) as log:
            return log.find(place)

    def _replayed(self, log: DeadLetterReader, replayer: Replayer | None, wish: ReplayWish) -> ReplayReport:
        topics, read = topics_of(wish.topic), _TimedRead(log)
        surveys = surveys_of(log, replayer, topics, wish.selection, wish.partition, read)
        before = sum(marks.count(REPLAYED) for _, marks in surveys)
        if wish.again:
            surveys = [(stretch, marks.replace(bytes([REPLAYED]), bytes([SELECTED]))) for stretch, marks in surveys]
        report = ReplayReport(replayed_before=before, left=sum(marks.count(SELECTED) for _, marks in surveys))
        deadline = time.monotonic() + LONGEST_REPLAY_S
        for letter in due_letters(log, surveys):
            if len(report.results) >= wish.limit or time.monotonic() > deadline:
                break
            if (one := replay_letter(letter, replayer)) is not None:
                report.results.append(one)
                report.left -= 1
        return report


class _TimedRead:
    """Reads stretches until the time is up. Raises TooMuchError then, ClusterError."""

    def __init__(self, log: DeadLetterReader) -> None:
        self._log = log
        self._deadline = time.monotonic() + LONGEST_SURVEY_S

    def __call__(self, stretch: PartitionRange) -> Iterable[Letter | ReplayMark]:
        for _, found in self._log.read(stretch):
            if time.monotonic() > self._deadline:
                raise TooMuchError(
                    f"the dead letters are not read in {LONGEST_SURVEY_S:g} s: name a later time, or use `fairlane dlq`"
                )
            yield found


def _from(stretch: PartitionRange, since: Place | None) -> PartitionRange | None:
    """The part of a stretch from a place on; None if it lies before it."""
    if since is None:
        return stretch
    topics = list(TOPICS.values())
    at, begin = (topics.index(stretch.topic), stretch.partition), (topics.index(since[0]), since[1])
    if at < begin:
        return None
    return replace(stretch, first=max(stretch.first, since[2])) if at == begin else stretch


def _is_wanted(found: Letter | ReplayMark, selection: Selection) -> bool:
    return isinstance(found, Letter) and selection.takes(found)


def _described(letter: Letter, *, with_input: bool) -> dict[str, Any]:
    written = {name: value.decode(errors="replace") for name, value in letter.record.headers.items()}
    return {**facts(letter), "headers": written, "content": contents(letter, with_input=with_input)}


def _plain(selection: Selection) -> dict[str, object]:
    """The filters that are set."""
    given = {name: value for name, value in asdict(selection).items() if value is not None}
    offsets: OffsetRange = selection.offsets
    given["offsets"] = f"{offsets.first}-{'' if offsets.last is None else offsets.last}"
    return given
