"""What every RequestStore does. A test class takes it over and says in the fixture ``requests`` which one."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import date
from typing import Any, Protocol

from fairlane.outcomes import Decision, Outcome
from fairlane.records import (
    AuditEvent,
    CacheUse,
    Cost,
    HistoryUse,
    Output,
    PassageReference,
    RetrievalUse,
    SourceCoordinate,
    Timings,
    TokenLogprob,
    TokenUsage,
    TopLogprob,
    UsageEvent,
)
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum
from fairlane_server.postgres.request_timeline import History, RecordedReply
from producers.gateway.results.request_store import EndedCursor, EndedFilter, RequestStore
from tests.kit.native_kit import ID, LABELS, decided, place, recorded, used
from tests.kit.openai_kit import MODEL

ANY = EndedFilter()


class Requests(Protocol):
    """A store, and what fills it."""

    def record(self, *replies: RecordedReply) -> None: ...

    def decide(self, *decisions: AuditEvent) -> None: ...

    def use(self, *events: UsageEvent) -> None: ...

    def ask(self, use: Callable[[RequestStore], Awaitable[Any]]) -> Any:
        """What comes of a question."""


class RequestStoreSuite:
    """Needs the fixture ``requests``: a store with nothing in it."""

    def test_a_reply_is_found_as_it_was_recorded(self, requests: Requests) -> None:
        full = recorded(
            1,
            request_id=ID,
            model_version="3",
            engine="torch",
            finish_reason="stop",
            output=Output(
                text="It is 5 o'clock — café \\ \" \n",
                logprobs=(TokenLogprob("It", -0.25, (TopLogprob("It", -0.25), TopLogprob("At", -2.5))),),
            ),
            usage=TokenUsage(12, 7, 4),
            timings=Timings(1, 2, 3, 4, 5, 6),
            batch_size=4,
            degradations=("shorter_context",),
            passages=(PassageReference("atlas/a#0", 0.5),),
            retrieval_use=RetrievalUse("atlas", "hybrid", None, 7, 12),
            cache_use=CacheUse("exact", "another", 1),
            history_use=HistoryUse(2, None, 3),
            attempts=2,
            cost=Cost(153_600, "XTS"),
        )
        requests.record(full, recorded(2))
        assert reply_of(requests, "acme", ID) == full

    def test_every_kind_of_output_comes_back(self, requests: Requests) -> None:
        outputs = (
            None,
            Output(text=""),
            Output(embeddings=((0.5, -1.0), (0.25, 3.0))),
            Output(scores=(0.25, 1.0, float("inf"))),
            LABELS,
        )
        requests.record(*(recorded(number, output=output) for number, output in enumerate(outputs)))
        for number, output in enumerate(outputs):
            found = reply_of(requests, "acme", f"{number:032x}")
            assert found is not None
            assert found.reply.output == output

    def test_nothing_is_found_of_another_tenant(self, requests: Requests) -> None:
        requests.record(recorded(1, request_id=ID), recorded(2, "globex", request_id=ID, output=Output(text="theirs")))
        requests.decide(decided(Decision.ACCEPTED, 1), decided(Decision.ACCEPTED, 2, tenant="globex"))
        found = reply_of(requests, "acme", ID)
        assert found is not None
        assert found.reply.output == Output(text="answer 1")
        history = history_of(requests, "acme", ID)
        assert (
            {event.tenant for event in history.decisions} == {one.reply.tenant for one in history.replies} == {"acme"}
        )
        assert len(history.decisions) == len(history.replies) == 1
        assert reply_of(requests, "initech", ID) is None
        assert not history_of(requests, "initech", ID).decisions
        assert not page_of(requests, "initech", ANY, None, 10)

    def test_the_newest_reply_of_an_id_counts(self, requests: Requests) -> None:
        first = recorded(1, request_id=ID, outcome=Outcome.REJECTED, code="overloaded", output=None)
        again = recorded(2, request_id=ID)
        requests.record(first, again)
        assert reply_of(requests, "acme", ID) == again
        history = history_of(requests, "acme", ID)
        assert [one.replied_at_ms for one in history.replies] == [first.replied_at_ms, again.replied_at_ms]

    def test_what_ran_is_found_whatever_was_refused_under_its_id_later(self, requests: Requests) -> None:
        before = recorded(1, request_id=ID, outcome=Outcome.REJECTED, code="overloaded", output=None)
        ran = recorded(2, request_id=ID)
        refused = recorded(3, request_id=ID, outcome=Outcome.REJECTED, code="quota_exceeded", output=None)
        expired = recorded(4, request_id=ID, outcome=Outcome.EXPIRED, output=None)
        requests.record(before, ran, refused, expired)
        assert reply_of(requests, "acme", ID) == ran
        assert len(history_of(requests, "acme", ID).replies) == 4

    def test_of_what_ran_twice_the_newest_is_found(self, requests: Requests) -> None:
        first = recorded(1, request_id=ID)
        again = recorded(2, request_id=ID, outcome=Outcome.FAILED, code="poison", output=None)
        refused = recorded(3, request_id=ID, outcome=Outcome.REJECTED, code="overloaded", output=None)
        requests.record(first, again, refused)
        assert reply_of(requests, "acme", ID) == again

    def test_an_answer_that_stands_in_the_log_twice_is_one(self, requests: Requests) -> None:
        once = recorded(1, request_id=ID)
        requests.record(once)
        requests.record(once)
        assert reply_of(requests, "acme", ID) == replace(once, replies_seen=2)
        assert [one.replies_seen for one in history_of(requests, "acme", ID).replies] == [2]
        assert len(page_of(requests, "acme", ANY, None, 10)) == 1

    def test_decisions_come_in_order_and_outputs_stay_away(self, requests: Requests) -> None:
        requests.decide(decided(Decision.DISPATCHED, 20, inputs={"waited_ms": "9"}), decided(Decision.ACCEPTED, 10))
        requests.record(recorded(1, request_id=ID))
        history = history_of(requests, "acme", ID)
        assert [event.decision for event in history.decisions] == ["accepted", "dispatched"]
        assert history.decisions[1].inputs == {"waited_ms": "9"}
        assert [one.reply.output for one in history.replies] == [None]

    def test_pages_are_stable_whatever_comes_meanwhile(self, requests: Requests) -> None:
        # Many at the same time, and an id that stands at several places.
        requests.record(*(recorded(number, at_ms=1_000 + number // 4) for number in range(10)))
        same = [
            recorded(number, request_id=ID, at_ms=1_001, source=SourceCoordinate("requests.acme", 0, number))
            for number in (40, 41, 42)
        ]
        requests.record(*same)
        everything = page_of(requests, "acme", ANY, None, 100)
        assert len(everything) == 13
        assert [place(one) for one in everything] == sorted(map(place, everything), reverse=True)
        seen: list[RecordedReply] = []
        behind: EndedCursor | None = None
        while page := page_of(requests, "acme", ANY, behind, 2):
            assert len(page) <= 2
            seen += page
            behind = EndedCursor(*place(page[-1]))
            requests.record(recorded(100 + len(seen), at_ms=2_000 + len(seen)))
        assert seen == list(everything)

    def test_pages_are_filtered(self, requests: Requests) -> None:
        requests.record(
            recorded(1, at_ms=1_000),
            recorded(2, at_ms=2_000, outcome=Outcome.FAILED, code="poison"),
            recorded(3, at_ms=3_000, model="other"),
            recorded(4, at_ms=4_000, model="other", outcome=Outcome.FAILED, code="poison"),
            recorded(5, "globex", at_ms=5_000),
        )
        for wanted, numbers in (
            (EndedFilter(), [4, 3, 2, 1]),
            (EndedFilter(outcome="failed"), [4, 2]),
            (EndedFilter(outcome="ok"), [3, 1]),
            (EndedFilter(model="other"), [4, 3]),
            (EndedFilter(model="other", outcome="ok"), [3]),
            (EndedFilter(since_ms=2_000, until_ms=4_000), [3, 2]),
            (EndedFilter(outcome="expired"), []),
        ):
            assert numbers_of(page_of(requests, "acme", wanted, None, 10)) == numbers
        last = EndedCursor(*place(recorded(4, at_ms=4_000)))
        failed = EndedFilter(outcome="failed")
        assert numbers_of(page_of(requests, "acme", failed, last, 10)) == [2]

    def test_usage_is_summed_up_by_what_is_asked_for(self, requests: Requests) -> None:
        requests.use(
            used(1, "2026-01-30", 100, requested_by="key:one"),
            used(2, "2026-01-31", 20, requested_by="key:one", priority_class="low", pool="other"),
            used(3, "2026-01-31", 3, model="other", model_version="2", requested_by="user:two", images=1),
            used(4, "2026-02-01", None, cached=True, completion_tokens=0),
            used(5, "2026-01-31", 7_000, tenant="globex"),
        )
        wanted: tuple[tuple[tuple[Group, ...], list[tuple[Any, ...]]], ...] = (
            ((), [((), None, 1, None), ((), "XTS", 3, 123)]),
            (
                (Group.DAY,),
                [
                    ((date(2026, 1, 30),), "XTS", 1, 100),
                    ((date(2026, 1, 31),), "XTS", 2, 23),
                    ((date(2026, 2, 1),), None, 1, None),
                ],
            ),
            ((Group.MONTH,), [((date(2026, 1, 1),), "XTS", 3, 123), ((date(2026, 2, 1),), None, 1, None)]),
            (
                (Group.MODEL, Group.VERSION),
                [((MODEL, "1"), None, 1, None), ((MODEL, "1"), "XTS", 2, 120), (("other", "2"), "XTS", 1, 3)],
            ),
            (
                (Group.POOL, Group.CLASS),
                [
                    (("generate", "normal"), None, 1, None),
                    (("generate", "normal"), "XTS", 2, 103),
                    (("other", "low"), "XTS", 1, 20),
                ],
            ),
            (
                (Group.CALLER,),
                [(("",), None, 1, None), (("key:one",), "XTS", 2, 120), (("user:two",), "XTS", 1, 3)],
            ),
        )
        for by, expected in wanted:
            found = sums_of(requests, SumQuery(by))
            in_order = sorted(expected, key=lambda one: (*map(str, one[0]), one[1] or ""))
            assert [(one.keys, one.currency, one.requests, one.cost_nanos) for one in found] == in_order
        (known,) = [one for one in sums_of(requests, SumQuery()) if one.currency]
        assert known == UsageSum((), "XTS", 3, 0, 30, 6, 3, 1, 150, 123)
        (unknown,) = [one for one in sums_of(requests, SumQuery()) if not one.currency]
        assert unknown == UsageSum((), None, 1, 1, 10, 0, 1, 0, 50, None)

    def test_usage_is_filtered(self, requests: Requests) -> None:
        requests.use(
            *(used(day, f"2026-01-{day:02}", 10**day, requested_by=f"key:{day}") for day in range(1, 6)),
            used(6, "2026-01-03", 7, model="other", model_version="9", pool="p", priority_class="high"),
        )
        for query, nanos in (
            (SumQuery(since=date(2026, 1, 2), until=date(2026, 1, 4)), 1_107),
            (SumQuery(since=date(2026, 1, 4)), 110_000),
            (SumQuery(until=date(2026, 1, 2)), 10),
            (SumQuery(only={Group.MODEL: "other"}), 7),
            (SumQuery(only={Group.VERSION: "9", Group.POOL: "p", Group.CLASS: "high"}), 7),
            (SumQuery(only={Group.CALLER: "key:2"}), 100),
            (SumQuery((Group.DAY,), only={Group.CALLER: "key:2"}), 100),
        ):
            assert [one.cost_nanos for one in sums_of(requests, query)] == [nanos]
        assert sums_of(requests, SumQuery(only={Group.MODEL: "none"})) == []

    def test_pages_of_sums_follow_one_another(self, requests: Requests) -> None:
        days = [f"2026-01-{day:02}" for day in range(1, 8)]
        requests.use(*(used(number, day, None if number % 3 else 1) for number, day in enumerate(days)))
        requests.use(*(used(10 + number, day, 1, model="other") for number, day in enumerate(days)))
        for by in ((Group.DAY,), (Group.MODEL, Group.DAY), (Group.MONTH, Group.MODEL)):
            query, seen = SumQuery(by), []  # type: tuple[SumQuery, list[UsageSum]]
            while page := sums_of(requests, query, seen[-1].place if seen else None, 2):
                assert len(page) <= 2
                seen += page
            assert seen == list(sums_of(requests, query))


def sums_of(
    requests: Requests, query: SumQuery, behind: Sequence[str] | None = None, most: int = 100
) -> Sequence[UsageSum]:
    """A page of sums."""
    found: Sequence[UsageSum] = requests.ask(lambda store: store.usage("acme", query, behind, most))
    return found


def reply_of(requests: Requests, tenant: str, request_id: str) -> RecordedReply | None:
    """The newest reply."""
    found: RecordedReply | None = requests.ask(lambda store: store.reply(tenant, request_id))
    return found


def history_of(requests: Requests, tenant: str, request_id: str) -> History:
    """Everything of an id."""
    found: History = requests.ask(lambda store: store.history(tenant, request_id))
    return found


def page_of(
    requests: Requests, tenant: str, wanted: EndedFilter, behind: EndedCursor | None, most: int
) -> Sequence[RecordedReply]:
    """A page of those that ended."""
    found: Sequence[RecordedReply] = requests.ask(lambda store: store.ended(tenant, wanted, behind, most))
    return found


def numbers_of(page: Sequence[RecordedReply]) -> list[int]:
    """By the ids that ``recorded`` makes."""
    return [int(one.reply.request_id, 16) for one in page]
