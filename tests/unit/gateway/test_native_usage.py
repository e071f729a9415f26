"""GET /v1/usage: the sums of the caller's own tenant, page by page, and what is no such question."""

from typing import Any

import httpx
import pytest

from producers.gateway.native.cursors import Cursors
from tests.kit.native_kit import KEY, OTHER_KEY, VIEWER_KEY, WORK_KEY, Bench, used
from tests.kit.openai_kit import MODEL


def asked(bench: Bench, query: str = "", key: str | None = KEY) -> httpx.Response:
    return bench.run(lambda client: client.get(f"/v1/usage{query}"), key)


def body(bench: Bench, query: str = "", key: str = KEY) -> dict[str, Any]:
    response = asked(bench, query, key)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_by_default_it_tells_of_every_day() -> None:
    bench = Bench()
    bench.store.use(used(1, "2026-01-30", 153_600), used(2, nanos=1), used(3, nanos=None), used(4, tenant="globex"))
    counts = {"cached_answers": 0, "images": 0, "engine_ms": 50}
    tokens = {"prompt_tokens": 10, "completion_tokens": 2, "cached_tokens": 1}
    assert body(bench) == {
        "data": [
            {
                "day": "2026-01-30",
                "requests": 1,
                **tokens,
                **counts,
                "cost": {"amount": "0.0001536", "currency": "XTS"},
            },
            {"day": "2026-01-31", "requests": 1, **tokens, **counts},
            {
                "day": "2026-01-31",
                "requests": 1,
                **tokens,
                **counts,
                "cost": {"amount": "0.000000001", "currency": "XTS"},
            },
        ],
        "has_more": False,
    }
    (other,) = body(bench, key=OTHER_KEY)["data"]
    assert other["cost"] == {"amount": "0.0000001", "currency": "XTS"}


def test_groups_and_filters_are_those_that_are_asked_for() -> None:
    bench = Bench()
    bench.store.use(
        used(1, requested_by="key:one"), used(2, priority_class="high"), used(3, "2026-02-01", model_version="2")
    )
    query = "?by=month&by=model&by=model_version&by=pool&by=priority"
    names = ("month", "model", "model_version", "pool", "priority")
    found = body(bench, query)["data"]
    assert [tuple(one[name] for name in names) for one in found] == [
        ("2026-01", MODEL, "1", "generate", "high"),
        ("2026-01", MODEL, "1", "generate", "normal"),
        ("2026-02", MODEL, "2", "generate", "normal"),
    ]
    assert [one["requested_by"] for one in body(bench, "?by=requested_by")["data"]] == ["", "key:one"]
    for filters, requests in (
        ("since=2026-02-01", 1),
        ("until=2026-02-01", 2),
        (f"model={MODEL}&model_version=2", 1),
        ("pool=generate&priority=high", 1),
        ("requested_by=key:one", 1),
    ):
        assert sum(one["requests"] for one in body(bench, f"?{filters}")["data"]) == requests


def test_pages_lead_to_one_another() -> None:
    bench = Bench()
    bench.store.use(*(used(day, f"2026-01-{day:02}") for day in range(1, 8)))
    days, cursor = [], ""
    while True:
        page = body(bench, f"?limit=3{cursor}")
        days += [one["day"] for one in page["data"]]
        if not page["has_more"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert days == [f"2026-01-{day:02}" for day in range(1, 8)]
    assert "next_cursor" not in page


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?by=tenant", "by"),
        ("?by=day&by=day", "by"),
        ("?by=requested_by&by=model", "by"),
        ("?requested_by=key:one&model=m", "by"),
        ("?since=yesterday", "since"),
        ("?limit=0", "limit"),
        ("?model=%00", "model"),
        ("?cursor=x", "cursor"),
    ],
)
def test_what_is_no_question_is_400(query: str, field: str) -> None:
    response = asked(Bench(), query)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["field"].split(".")[0]) == ("invalid", field)


@pytest.mark.parametrize("place", [(), ("2026-01-01",), ("yesterday", "XTS"), ("2026-01-01", "\0"), ("a", "b", "c")])
def test_a_cursor_with_another_place_is_none(place: tuple[str, ...]) -> None:
    cursor = Cursors(tuple[str, ...]).encode(("acme", "day", "", "None", "None"), place)
    response = asked(Bench(), f"?cursor={cursor}")
    assert (response.status_code, response.json()["error"]["message"]) == (400, "is no cursor")


def test_a_cursor_belongs_to_its_query_and_tenant() -> None:
    bench = Bench()
    bench.store.use(used(1), used(2, "2026-01-30"))
    cursor = body(bench, "?limit=1")["next_cursor"]
    for query, key in ((f"?cursor={cursor}&by=month", KEY), (f"?cursor={cursor}", OTHER_KEY)):
        response = asked(bench, query, key)
        assert (response.status_code, response.json()["error"]["field"]) == (400, "cursor")


def test_who_may_read_results_may_read_it() -> None:
    bench = Bench()
    assert asked(bench, key=VIEWER_KEY).status_code == 200
    assert asked(bench, key=WORK_KEY).status_code == 403
    assert asked(bench, key=None).status_code == 401


def test_without_postgres_it_is_503() -> None:
    bench = Bench()
    bench.away(postgres=True)
    response = asked(bench)
    assert response.status_code == 503
    assert "retry-after" in response.headers
