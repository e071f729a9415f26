"""When copies of what was erased are gone."""

from fairlane_server.erasure.expiry import (
    CLEANUP_MS,
    COPY_MS,
    DEFAULT_SEGMENT_MS,
    RUN_MS,
    Lifetimes,
    expiries,
    kept,
    tombstone_ms,
)
from fairlane_server.topics.families import load_families

DAY_MS = 86_400_000
LIVES = Lifetimes(
    request_ms=DAY_MS,
    cached_results_ms=300_000,
    cached_answers_ms=200_000,
    gateway_memory_ms=60_000,
    audit_ms=9_000,
    usage_ms=8_000,
)
AT_MS = 1_760_000_000_000


def test_every_topic_with_texts_is_named_with_the_end_of_its_segments() -> None:
    found = {one.store: one.gone_by_ms - AT_MS for one in expiries(AT_MS, "acme", load_families(), LIVES)}
    # What was under way at the erasure is worked on until its deadline, and copied then at the latest.
    under_way = DAY_MS + RUN_MS
    assert found["memory:gateway"] == under_way + 60_000
    assert found["redis:result"] == under_way + 300_000
    assert found["redis:response"] == found["redis:retrieval"] == found["memory:dispatcher"] == under_way + 200_000
    topics = {store.removeprefix("topic:"): life for store, life in found.items() if store.startswith("topic:")}
    week, fortnight = (days * DAY_MS + DEFAULT_SEGMENT_MS + CLEANUP_MS for days in (7, 14))
    assert topics == {
        # Its segments are as long as its retention.
        "chunks.acme": under_way + 2 * 600_000 + CLEANUP_MS,
        "requests.acme": week,
        "backfill.acme": fortnight,
        **dict.fromkeys(
            ("replies.acme", "replies.acme.{service}", "gateway.replies", "jobs.replies"),
            under_way + week,
        ),
        "ledger.feedback": under_way + fortnight,
        # A copy for evaluation is made of what was under way, and waits.
        "evaluation.work": under_way + DAY_MS + DEFAULT_SEGMENT_MS + CLEANUP_MS,
        **dict.fromkeys(("priority.{pool}.{class}", "returned.{pool}"), under_way + COPY_MS + fortnight),
        "evaluation.replies": under_way + COPY_MS + week,
        # A record that cannot be read is found when it is read, in the last moment of its topic.
        "dead-letter.requests": fortnight + fortnight,
        "dead-letter.work": under_way + fortnight + fortnight,
        "dead-letter.replies.acme": under_way + week + fortnight,
    }


def test_nothing_is_left_when_a_tombstone_ends() -> None:
    last = expiries(AT_MS, "acme", load_families(), LIVES)[-1]
    assert AT_MS + tombstone_ms(load_families()) > last.gone_by_ms


def test_the_first_to_go_comes_first() -> None:
    times = [one.gone_by_ms for one in expiries(AT_MS, "acme", load_families(), LIVES)]
    assert times == sorted(times)


def test_what_is_kept_has_no_text() -> None:
    assert {one.store: one.gone_by_ms - AT_MS for one in kept(AT_MS, LIVES)} == {
        "postgres:audit_logs": 9_000,
        "postgres:erasures": 9_000,
        "postgres:usage": 8_000,
    }


def test_a_tombstone_outlives_every_way_through_the_topics() -> None:
    # Offline request, work, dead letter; the same again as its replay; reply.
    longest = 5 * 14 * DAY_MS + 7 * DAY_MS + 6 * (DEFAULT_SEGMENT_MS + CLEANUP_MS)
    assert tombstone_ms(load_families()) == longest
    assert tombstone_ms(()) == 0
