"""What is added to requests counts: in the window, in admission, in the turn of their tenant and in its quota."""

from typing import Any

import pytest

from fairlane.records import InferenceRequest, RequestInput, Retrieval, WorkItem
from stream_processors.dispatcher.scheduling.cost import ContextTokens
from stream_processors.dispatcher.scheduling.fair_queue import make_fair_queue
from tests.kit.dispatcher_bench import Bench, encoded, request
from tests.kit.fake_passages import collection, hit

PASSAGE_TOKENS = 800


def grounded(**fields: Any) -> InferenceRequest:
    return request(1, retrieval=Retrieval("handbook", 1), **fields)


def test_it_rises_at_once_and_falls_slowly() -> None:
    tokens = ContextTokens()
    assert tokens.expected("acme", grounded()) == 0
    tokens.learn("acme", grounded(), 100)
    tokens.learn("acme", grounded(), 1_000)
    assert tokens.expected("acme", grounded()) == 1_000
    tokens.learn("acme", grounded(), 0)
    assert tokens.expected("acme", grounded()) == 900


def test_kinds_and_tenants_are_told_apart() -> None:
    tokens = ContextTokens()
    tokens.learn("acme", grounded(), 100)
    tokens.learn("acme", request(1), 100)
    assert len(tokens) == 1
    for tenant, other in (
        ("acme", request(1)),
        ("acme", request(1, conversation_id="talk")),
        ("acme", grounded(conversation_id="talk")),
        ("globex", grounded()),
    ):
        assert tokens.expected(tenant, other) == 0


def test_it_remembers_so_many() -> None:
    tokens = ContextTokens(max_entries=2)
    for tenant in ("a", "b", "c"):
        tokens.learn(tenant, grounded(), 10)
    assert [tokens.expected(tenant, grounded()) for tenant in "abc"] == [0, 10, 10]


@pytest.fixture
def bench() -> Bench:
    made = Bench(retrieval_budget_ms=200)
    made.passages.add(collection())
    made.passages.nearest = (hit("a", PASSAGE_TOKENS),)
    return made


def asked(number: int, **fields: Any) -> bytes:
    return encoded(number, **{"retrieval": Retrieval("handbook", 1), **fields})


def work(bench: Bench) -> list[WorkItem]:
    return bench.decoded("priority.pool.normal")


def in_flight(bench: Bench) -> int:
    return bench.dispatcher.scheduler.in_flight.tokens("pool")


def test_what_was_added_fills_the_window(bench: Bench) -> None:
    bench.report(rate=1_000.0, tokens=2_000)
    bench.run(*(asked(number) for number in range(1, 41)))
    first_round = len(work(bench))
    # What was taken before anything was known is counted as soon as it is.
    assert in_flight(bench) == sum(item.cost_tokens for item in work(bench)) > first_round * PASSAGE_TOKENS
    bench.commit()
    assert len(bench.dispatcher.scheduler) == 40 - first_round

    known = Bench(retrieval_budget_ms=200)
    known.passages.add(collection())
    known.passages.nearest = (hit("a", PASSAGE_TOKENS),)
    known.report(rate=1_000.0, tokens=2_000)
    known.classifier.context.learn("acme", grounded(), PASSAGE_TOKENS)
    known.run(*(asked(number) for number in range(1, 41)))
    sent = work(known)
    assert 0 < len(sent) < 8
    assert in_flight(known) == sum(item.cost_tokens for item in sent)


def test_it_costs_what_was_found_and_not_what_was_expected(bench: Bench) -> None:
    bench.report(rate=1e9, tokens=10**6)
    bench.classifier.context.learn("acme", grounded(), 50_000)
    bench.run(encoded(2), asked(1))
    plain, found = work(bench)
    assert PASSAGE_TOKENS <= found.prompt_tokens - plain.prompt_tokens < 2 * PASSAGE_TOKENS
    assert found.cost_tokens - plain.cost_tokens == found.prompt_tokens - plain.prompt_tokens
    assert bench.classifier.context.expected("acme", grounded()) < 50_000


def test_a_tenant_is_charged_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[tuple[str, float]] = []

    def charge(_queue: object, tenant: str, _group: str, _class: str, tokens: float) -> None:
        charged.append((tenant, tokens))

    monkeypatch.setattr(type(make_fair_queue("drr")), "charge", charge)
    bench.report(rate=1e9, tokens=10**6)
    bench.run(encoded(2), asked(1))
    plain, item = work(bench)
    assert charged == [("acme", item.cost_tokens - plain.cost_tokens)]


def test_a_quota_is_asked_for_it(bench: Bench) -> None:
    first = bench.queued(grounded())
    bench.classifier.context.learn("acme", grounded(), PASSAGE_TOKENS)
    second = bench.queued(grounded(input=RequestInput(prompt="a prompt nobody may see")))
    assert second.quota_tokens == first.quota_tokens + PASSAGE_TOKENS
    assert (second.cost_tokens, second.prompt_tokens) == (
        first.cost_tokens + PASSAGE_TOKENS,
        first.prompt_tokens + PASSAGE_TOKENS,
    )
