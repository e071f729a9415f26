"""The benchmark of the caches in a short version: on a real Postgres and Redis, with the real embedder."""

import asyncio

import pytest

from benchmarks import cache
from benchmarks.cache import cross_tenant_hits

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model]


def test_a_short_run_finds_again_what_was_asked_before_and_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TENANTS": 2, "PASSAGES": 100, "QUESTIONS": 50, "ASKED": 200, "TIMED": 20}.items():
        monkeypatch.setattr(cache, name, value)
    monkeypatch.setattr(cache, "INTRUSIONS", 1_000)
    monkeypatch.setattr(cache, "repeated", lambda measure: (measure(0),))

    result = cache.run()

    assert result.benchmark == "cache"
    figures = {figure.name: figure.value for figure in result.figures}
    asked_before = figures["questions that were asked before"]
    assert figures["questions answered from memory or Redis"] == pytest.approx(asked_before)
    assert asked_before > 0
    assert figures["hits across tenants"] == 0
    assert figures["the owner's own look-ups that hit"] == 1
    assert figures["of these with the owner's entry in place"] > 100


def test_the_intruders_would_notice_an_open_door(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check of whose an entry is, what was planted would be found."""
    from fairlane_server.caching import entries

    monkeypatch.setattr(
        "fairlane_server.redis.cache.unseal",
        lambda _key, entry, *_: entries._decoder.decode(entry[17:]).payload,
    )
    found = asyncio.run(cross_tenant_hits(redis_url, 1_000, texts=4))
    assert found["hits"] == found["planted"] > 100
