"""Pages of dead letters, and what is recorded of replays, over dead letters in memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.administration import dead_letters as office_module
from fairlane_server.administration.dead_letters import DeadLetterOffice, Place, ReplayWish
from fairlane_server.administration.events import AuditError
from fairlane_server.dead_letters.bulk import TOPICS, DeadLetters
from fairlane_server.dead_letters.letters import Letter, ReplayMark, StoredRecord
from fairlane_server.dead_letters.log import PartitionRange
from fairlane_server.dead_letters.selection import Selection
from fairlane_server.kafka.cluster_admin import ClusterError
from tests.kit.memory_audit import MemoryAudit

REQUESTS, WORK = TOPICS[DeadLetters.REQUESTS], TOPICS[DeadLetters.WORK]
PROMPT = "a secret"


def letter(topic: str, offset: int, tenant: str = "acme") -> Letter:
    request = InferenceRequest(
        f"0b0f1b52-6a3f-4f0e-9a55-{offset:012d}", "m", "generate", RequestInput(prompt=PROMPT), tenant=tenant
    )
    source = SourceCoordinate(f"requests.{tenant}", 0, offset)
    work = WorkItem(request, tenant, "p", "1", "normal", 1, 1, 1, 1, 1, f"replies.{tenant}", "d", source)
    return Letter(StoredRecord(SourceCoordinate(topic, 0, offset), 1_000 + offset, None, b"", {}), work)


class MemoryLog:
    """The two topics, with one partition each."""

    def __init__(self, records: dict[str, list[Letter | ReplayMark | None]]) -> None:
        self.records = records

    def __enter__(self) -> "MemoryLog":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def stretches(self, topics: Iterable[str], **_: Any) -> list[PartitionRange]:
        return [PartitionRange(topic, 0, 0, len(self.records[topic])) for topic in topics]

    def read(self, stretch: PartitionRange) -> Iterator[tuple[int, Letter | ReplayMark]]:
        for offset in range(stretch.first, stretch.end):
            if (found := self.records[stretch.topic][offset]) is not None:
                yield offset, found

    def find(self, place: SourceCoordinate) -> Letter | None:
        found = self.records[place.topic][place.offset]
        return found if isinstance(found, Letter) else None


@contextmanager
def opened(records: dict[str, list[Letter | ReplayMark | None]]) -> Iterator[tuple[DeadLetterOffice, MemoryAudit]]:
    audit = MemoryAudit()
    with patch.object(office_module, "DeadLetterReader", lambda *_: MemoryLog(records)):
        yield DeadLetterOffice(Settings(), default_codec(), audit), audit


MANY: dict[str, list[Letter | ReplayMark | None]] = {
    REQUESTS: [letter(REQUESTS, 0), None, letter(REQUESTS, 2, "globex"), letter(REQUESTS, 3)],
    WORK: [
        letter(WORK, 0),
        letter(WORK, 1),
        ReplayMark(SourceCoordinate(WORK, 0, 0), "again"),
        letter(WORK, 3),
        ReplayMark(SourceCoordinate(WORK, 0, 0), "once more"),
    ],
}


def pages(office: DeadLetterOffice, selection: Selection, limit: int) -> list[list[tuple[str, int]]]:
    found, since = [], None
    while True:
        page = office.page(None, selection, since, limit)
        found.append([(row["topic"], row["offset"]) for row in page.letters])
        since = page.following
        if since is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 10])
def test_pages_hold_every_letter_once_and_in_order(limit: int) -> None:
    with opened(MANY) as (office, _):
        every = [(REQUESTS, 0), (REQUESTS, 2), (REQUESTS, 3), (WORK, 0), (WORK, 1), (WORK, 3)]
        found = pages(office, Selection(), limit)
        assert [one for page in found for one in page] == every
        assert all(len(page) <= limit for page in found)
        of_acme = pages(office, Selection(tenant="acme"), limit)
        assert [one for page in of_acme for one in page] == [one for one in every if one != (REQUESTS, 2)]


def test_replays_behind_a_page_are_seen() -> None:
    with opened(MANY) as (office, _):
        page = office.page(DeadLetters.WORK, Selection(), None, 1)
        assert page.letters[0]["replayed_as"] == ["again", "once more"]
        assert PROMPT not in str(page.letters)


def test_a_page_ends_after_so_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office_module, "MOST_READ_OF_PAGE", 2)
    with opened(MANY) as (office, _):
        found = pages(office, Selection(tenant="globex"), 10)
        assert [one for page in found for one in page] == [(REQUESTS, 2)]
        assert len(found) > 2


def test_a_place_beyond_the_log_gives_an_empty_page() -> None:
    beyond: Place = (WORK, 0, 1_000)
    with opened(MANY) as (office, _):
        page = office.page(None, Selection(), beyond, 10)
        assert (page.letters, page.following) == ([], None)


def test_a_payload_that_cannot_be_recorded_is_not_shown() -> None:
    place = SourceCoordinate(WORK, 0, 1)
    with opened(MANY) as (office, audit):
        shown = office.payload(place, "key:1")
        assert shown is not None
        assert PROMPT in str(shown)
        assert [(one.name, one.author, one.tenant) for one in audit.events] == [
            ("dead_letter_payload_read", "key:1", "acme")
        ]
        assert PROMPT not in str(audit.events)
        assert PROMPT not in str(office.letter(place))
        audit.is_away = True
        with pytest.raises(AuditError):
            office.payload(place, "key:1")
        assert office.payload(SourceCoordinate(WORK, 0, 2), "key:1") is None


def test_a_dry_run_records_nothing_and_a_failed_replay_is_recorded_as_failed() -> None:
    wish = ReplayWish(DeadLetters.WORK, None, Selection(), limit=1, again=False)

    class Fenced:
        def __init__(self, *_: object) -> None:
            raise ClusterError("fenced")

    with opened(MANY) as (office, audit):
        report = office.replay(wish, "key:1", dry_run=True)
        assert ([one.result for one in report.results], report.left, report.replayed_before) == (["replayed"], 1, 1)
        assert audit.events == []
        with patch.object(office_module, "Replayer", Fenced), pytest.raises(ClusterError):
            office.replay(wish, "key:1", dry_run=False)
        assert [(one.outcome, one.of_event) for one in audit.events] == [("started", None), ("failed", 1)]
        assert audit.events[1].details == {"reason": "fenced"}
