"""POST /v1/feedback: what is published, and what is refused."""

from typing import Any

import httpx
import pytest

from fairlane.outcomes import Decision
from fairlane.records import Feedback
from tests.kit.native_kit import (
    ID,
    KEY,
    MOST_BODY_BYTES,
    OTHER_KEY,
    RESULTS_KEY,
    VIEWER_KEY,
    WORK_KEY,
    Bench,
    decided,
    recorded,
)

SECRET = "what nobody may read"
DAY_MS = 86_400_000


@pytest.fixture
def bench() -> Bench:
    """A gateway with an answered request of acme."""
    made = Bench()
    made.store.record(recorded(1, request_id=ID, at_ms=made.clock()))
    return made


def give(bench: Bench, key: str = KEY, **fields: Any) -> httpx.Response:
    body = {"request_id": ID} | fields
    return bench.run(lambda http: http.post("/v1/feedback", json=body), key)


def test_feedback_is_published_with_its_tenant_and_caller(bench: Bench) -> None:
    answer = give(bench, score=1, tags=["tone", "flagged"], comment="well said", correction="Paris.")
    assert (answer.status_code, answer.json()) == (202, {"request_id": ID, "status": "accepted"})
    assert give(bench, WORK_KEY, thumb="down").status_code == 202
    assert bench.submitter.feedback == [
        Feedback(
            ID,
            "acme",
            score=1.0,
            correction="Paris.",
            tags=("tone", "flagged"),
            comment="well said",
            given_by="key:key-1",
        ),
        Feedback(ID, "acme", thumb="down", given_by="key:key-5"),
    ]


def test_a_request_of_another_tenant_is_as_unknown_as_one_that_never_was(bench: Bench) -> None:
    others = give(bench, OTHER_KEY, thumb="up")
    never = give(bench, request_id=ID.replace("0b0f1b52", "11111111"), thumb="up")
    no_id = give(bench, request_id=SECRET, thumb="up")
    assert others.status_code == never.status_code == no_id.status_code == 404
    assert others.json() == never.json() == no_id.json()
    assert bench.submitter.feedback == []


def test_a_request_that_waits_may_be_rated_and_one_whose_result_is_gone_may_not(bench: Bench) -> None:
    waits, expired, erased = (f"{number:032x}" for number in (7, 8, 9))
    bench.store.decide(decided(Decision.ACCEPTED, 1, request_id=waits))
    assert give(bench, request_id=waits, thumb="up").status_code == 202
    bench.store.decide(decided(Decision.EXPIRED, bench.clock() - 2 * DAY_MS, request_id=expired))
    bench.store.decide(decided(Decision.GUARDED, bench.clock(), request_id=erased))
    bench.store.erased.add(("acme", erased))
    for gone, code in ((expired, "result_expired"), (erased, "result_erased")):
        answer = give(bench, request_id=gone, thumb="up")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    assert len(bench.submitter.feedback) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "feedback"),
        ({"thumb": "sideways"}, "thumb"),
        ({"thumb": "up", "score": 0.5}, "score"),
        ({"score": 1.5}, "score"),
        ({"score": "1"}, "score"),
        ({"thumb": "up", "tags": ["a"] * 17}, "tags"),
        ({"thumb": "up", "tags": ["a", SECRET]}, "tags[1]"),
        ({"comment": ""}, "comment"),
        ({"comment": SECRET * 300}, "comment"),
        ({"thumb": "up", "given_by": SECRET}, "given_by"),
        ({"thumb": "up", "tenant": "globex"}, "tenant"),
    ],
)
def test_an_invalid_field_is_named_and_not_quoted(bench: Bench, fields: dict[str, Any], field: str) -> None:
    answer = give(bench, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["field"]) == (400, field)
    assert SECRET not in answer.text
    assert bench.submitter.feedback == []


def test_a_body_that_is_too_large_is_refused(bench: Bench) -> None:
    assert give(bench, comment="x" * MOST_BODY_BYTES).status_code == 413


@pytest.mark.parametrize("key", [VIEWER_KEY, RESULTS_KEY])
def test_who_may_only_read_gives_none(bench: Bench, key: str) -> None:
    assert give(bench, key, thumb="up").status_code == 403
    assert bench.submitter.feedback == []


def test_without_postgres_it_is_not_known_whose_request_it_is(bench: Bench) -> None:
    bench.away(postgres=True)
    answer = give(bench, request_id=ID.replace("0b0f1b52", "11111111"), thumb="up")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert bench.submitter.feedback == []
