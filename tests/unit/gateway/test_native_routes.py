"""The native routes: sent, waited for, asked for, cancelled and listed; and what is refused."""

import asyncio
import base64
import json
from functools import partial
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from fairlane.clock import now_ms
from fairlane.outcomes import Decision, Outcome
from fairlane.records import Output
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.edge.access_log import CallLog
from producers.gateway.pipeline.publisher import away, not_confirmed
from producers.openai_api.errors import CLIENT_CLOSED_REQUEST, UNCERTAIN
from tests.kit.native_kit import (
    ID,
    KEY,
    LABELS,
    MOST_BODY_BYTES,
    OTHER_KEY,
    QUESTION,
    RESULTS_KEY,
    SCORES,
    VIEWER_KEY,
    WORK_KEY,
    Bench,
    decided,
    recorded,
)
from tests.kit.openai_kit import MODEL, Gate, Script
from tests.kit.waiting import eventually_async

PNG = b"\x89PNG\r\n"
DAY_MS = 86_400_000


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def refusing() -> Bench:
    """For calls that are refused before anything comes of them."""
    return Bench()


def post(bench: Bench, body: Any, path: str = "/v1/requests", key: str | None = KEY, **more: Any) -> httpx.Response:
    """One call."""
    return bench.run(lambda http: http.post(path, json=body, **more), key)


def get(bench: Bench, path: str, key: str | None = KEY, **more: Any) -> httpx.Response:
    return bench.run(lambda http: http.get(path, **more), key)


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and field."""
    told = answer.json()["error"]
    return answer.status_code, told["code"], told.get("field")


@pytest.mark.parametrize("path", ["/v1/requests", "/inference"])
def test_a_request_is_accepted_with_its_id_and_where_to_go_on(bench: Bench, path: str) -> None:
    answer = post(bench, QUESTION, path)
    body = answer.json()
    own = f"/v1/requests/{body['id']}"
    assert answer.status_code == 202
    assert body == {
        "id": body["id"],
        "status": "queued",
        "links": {"self": own, "result": f"/v1/results/{body['id']}", "events": f"{own}/events"},
    }
    assert answer.headers["location"] == own
    ((tenant, request),) = bench.submitter.submitted
    assert (tenant, request.request_id, request.model, request.task) == ("acme", body["id"], MODEL, "generate")
    assert bench.submitter.waiting[0].forgotten
    assert not bench.submitter.cancelled


def test_everything_a_request_can_say_is_published(bench: Bench) -> None:
    body = {
        "model": MODEL,
        "input": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        "parameters": {"max_tokens": 5, "temperature": 1, "top_p": 0.5, "stop": "x", "seed": 7, "logprobs": 2},
        "priority": "high",
        "timeout_ms": 1_000,
        "retrieval": {"collection": "atlas", "top_k": 2, "mode": "vector"},
        "conversation_id": "talk",
        "conversation_after": ID,
        "cache": "exact",
        "group": "batch",
        "metadata": {"order": "7"},
    }
    assert post(bench, body).status_code == 202
    ((_, request),) = bench.submitter.submitted
    assert request.input.messages is not None
    assert [message.role for message in request.input.messages] == ["system", "user"]
    assert (request.parameters.max_tokens, request.parameters.stop, request.parameters.logprobs) == (5, ("x",), 2)
    assert (request.priority, request.timeout_ms, request.cache, request.group) == ("high", 1_000, "exact", "batch")
    assert request.retrieval is not None
    assert (request.retrieval.collection, request.retrieval.top_k, request.retrieval.mode) == ("atlas", 2, "vector")
    assert (request.conversation_id, request.conversation_after, request.metadata) == ("talk", ID, {"order": "7"})


@pytest.mark.parametrize(
    ("task", "given", "found"),
    [
        ("embed", {"texts": ["a", "b"]}, {"texts": ("a", "b")}),
        ("rank", {"query": "q", "documents": ["a"]}, {"query": "q", "documents": ("a",)}),
        ("classify", {"image": base64.b64encode(PNG).decode()}, {"image": PNG}),
    ],
)
def test_each_task_has_its_input(bench: Bench, task: str, given: dict[str, Any], found: dict[str, Any]) -> None:
    assert post(bench, {"model": MODEL, "task": task, "input": given}).status_code == 202
    ((_, request),) = bench.submitter.submitted
    assert {name: getattr(request.input, name) for name in found} == found


def test_who_waits_gets_the_result(bench: Bench) -> None:
    answer = post(bench, QUESTION, params={"wait": 10})
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["outcome"], body["output"]["text"]) == (
        "done",
        "ok",
        "The capital of France is Paris.",
    )
    assert body["usage"] == {"prompt_tokens": 12, "completion_tokens": 7, "cached_tokens": 4}
    assert answer.headers["cache-control"] == "no-store"
    assert bench.submitter.waiting[0].forgotten


def test_who_waits_in_vain_gets_the_id(bench: Bench) -> None:
    bench.submitter.scripts.append(Script(before_reply=Gate()))
    answer = post(bench, QUESTION, params={"wait": 0.01})
    assert answer.status_code == 202
    assert answer.json()["id"] == bench.submitter.submitted[0][1].request_id
    assert bench.submitter.waiting[0].forgotten
    assert not bench.submitter.cancelled


def test_nobody_waits_longer_than_the_gateway() -> None:
    bench = Bench(wait_s=0.01)
    bench.submitter.scripts += [Script(before_reply=Gate()), Script(before_reply=Gate())]
    assert post(bench, QUESTION, params={"wait": 3_000}).status_code == 202
    ranked = post(bench, {"model": MODEL, "query": "q", "documents": ["a"]}, "/v1/rank")
    assert error(ranked) == (504, "timeout", None)
    assert ranked.json()["error"]["request_id"] == bench.submitter.submitted[1][1].request_id


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ({"outcome": Outcome.REJECTED, "code": "overloaded", "retry_after_ms": 1_500}, 429),
        ({"outcome": Outcome.REJECTED, "code": "invalid", "field": "input"}, 400),
        ({"outcome": Outcome.EXPIRED}, 504),
        ({"outcome": Outcome.CANCELLED}, 499),
        ({"outcome": Outcome.FAILED, "code": "poison"}, 500),
    ],
)
def test_who_waits_is_answered_with_what_the_reply_stands_for(
    bench: Bench, outcome: dict[str, Any], status: int
) -> None:
    bench.submitter.scripts.append(Script(outcome=outcome))
    answer = post(bench, QUESTION, params={"wait": 10})
    assert answer.status_code == status
    assert answer.json()["error"]["request_id"] == bench.submitter.submitted[0][1].request_id
    if "retry_after_ms" in outcome:
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")


def test_the_same_key_sends_the_work_once(bench: Bench) -> None:
    headers = {"idempotency-key": "order-7"}

    async def test(http: httpx.AsyncClient) -> None:
        first = await http.post("/v1/requests", json=QUESTION, headers=headers, params={"wait": 10})
        again = await http.post("/v1/requests", json=QUESTION, headers=headers, params={"wait": 10})
        later = await http.post("/v1/requests", json=QUESTION, headers=headers)
        other = await http.post("/v1/requests", json=QUESTION | {"priority": "low"}, headers=headers)
        assert (first.status_code, again.status_code, later.status_code) == (200, 200, 202)
        assert first.json()["id"] == again.json()["id"] == later.json()["id"]
        assert again.json()["output"] == first.json()["output"]
        assert later.json()["status"] == "done"
        assert error(other) == (422, "idempotency_key_reused", "Idempotency-Key")

    bench.submitter.on_reply = lambda reply: bench.store.record(RecordedReply(reply, now_ms()))
    bench.run(test)
    assert len(bench.submitter.submitted) == 1


def test_the_same_key_is_told_while_the_first_is_under_way(bench: Bench) -> None:
    bench.submitter.scripts.append(Script(before_reply=Gate()))
    headers = {"idempotency-key": "order-8"}

    async def test(http: httpx.AsyncClient) -> None:
        first = await http.post("/v1/requests", json=QUESTION, headers=headers)
        again = await http.post("/v1/requests", json=QUESTION, headers=headers)
        assert error(again) == (409, "request_in_flight", "Idempotency-Key")
        assert again.json()["error"]["request_id"] == first.json()["id"]

    bench.run(test)


def test_documents_are_ranked_best_first(bench: Bench) -> None:
    bench.submitter.scripts += [Script(outcome={"output": SCORES})] * 2
    body = {"model": MODEL, "query": "q", "documents": ["a", "b", "c"]}
    ranked = post(bench, body, "/v1/rank").json()
    assert ranked["results"] == [{"index": 1, "score": 0.75}, {"index": 0, "score": 0.25}, {"index": 2, "score": None}]
    assert len(post(bench, body | {"top_n": 1}, "/v1/rank").json()["results"]) == 1
    assert bench.submitter.submitted[0][1].task == "rank"


def test_an_image_is_classified(bench: Bench) -> None:
    bench.submitter.scripts.append(Script(outcome={"output": LABELS}))
    body = {"model": MODEL, "image": base64.b64encode(PNG).decode(), "top_n": 1}
    answer = post(bench, body, "/v1/classify").json()
    assert answer["labels"] == [{"label": "seven", "score": 0.75}]
    assert bench.submitter.submitted[0][1].input.image == PNG


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"task": "paint"}, "task"),
        ({"input": {}}, "input.messages"),
        ({"input": {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}}, "input.messages"),
        ({"input": {"messages": [{"role": "robot", "content": "b"}]}}, "input.messages[0].role"),
        ({"input": {"messages": [{"role": "user", "content": 7}]}}, "input.messages[0].content"),
        ({"input": {"texts": ["a"]}}, "input.texts"),
        ({"input": {"prompt": "a", "surprise": 1}}, "input.surprise"),
        ({"task": "classify", "input": {"image": "no base64!"}}, "input.image"),
        ({"task": "embed", "input": {"texts": ["a"]}, "parameters": {"stream": True}}, "parameters.stream"),
        ({"parameters": {"max_tokens": 0}}, "parameters.max_tokens"),
        ({"parameters": {"temperature": "warm"}}, "parameters.temperature"),
        ({"parameters": {"stop": ["x"] * 9}}, "parameters.stop"),
        ({"priority": "urgent"}, "priority"),
        ({"timeout_ms": 2**63}, "timeout_ms"),
        ({"timeout_ms": 1.5}, "timeout_ms"),
        ({"retrieval": {"collection": "a", "top_k": 65}}, "retrieval.top_k"),
        ({"conversation_after": ID}, "conversation_after"),
        ({"conversation_id": "talk", "conversation_after": "yesterday"}, "conversation_after"),
        ({"metadata": {"order": 7}}, "metadata.order"),
        ({"reply_to": "replies.globex"}, "reply_to"),
        ({"tenant": "globex"}, "tenant"),
    ],
)
def test_a_mistake_is_told_with_its_field(refusing: Bench, change: dict[str, Any], field: str) -> None:
    answer = post(refusing, QUESTION | change)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == field
    assert not refusing.submitter.submitted


@pytest.mark.parametrize(
    ("change", "field"),
    [({"documents": []}, "documents"), ({"query": ""}, "query"), ({"top_n": 0}, "top_n"), ({"input": {}}, "input")],
)
def test_the_flat_routes_name_their_own_fields(refusing: Bench, change: dict[str, Any], field: str) -> None:
    answer = post(refusing, {"model": MODEL, "query": "q", "documents": ["a"]} | change, "/v1/rank")
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


SECRET = "sesame-planted-secret"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "\xff\xfe"}',
        b'{"model": "\\ud800", "input": {"prompt": "a"}}',
        b'{"model": NaN}',
        b'{"parameters": {"temperature": 1e999}}',
        b'{"timeout_ms": ' + b"9" * 5_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
        b'{"input": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        json.dumps({"model": SECRET * 100, "input": SECRET, SECRET: SECRET, "task": SECRET}).encode(),
    ],
)
def test_bytes_that_are_no_request_are_refused_and_never_quoted(refusing: Bench, raw: bytes) -> None:
    for path in ("/v1/requests", "/v1/rank", "/v1/classify"):
        call = partial(httpx.AsyncClient.post, url=path, content=raw, headers={"content-type": "application/json"})
        answer = refusing.run(call)
        assert answer.status_code == 400, answer.text
        assert SECRET not in answer.text
    assert not refusing.submitter.submitted


def test_a_body_that_is_too_large_is_refused(bench: Bench) -> None:
    body = QUESTION | {"input": {"prompt": "x" * MOST_BODY_BYTES}}
    assert post(bench, body).status_code == 413
    assert not bench.submitter.submitted


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/requests"),
        ("POST", "/inference"),
        ("GET", "/v1/requests"),
        ("GET", f"/v1/requests/{ID}"),
        ("DELETE", f"/v1/requests/{ID}"),
        ("GET", f"/v1/requests/{ID}/events"),
        ("GET", f"/v1/results/{ID}"),
        ("GET", f"/results/{ID}"),
        ("POST", "/v1/rank"),
        ("POST", "/v1/classify"),
    ],
)
def test_no_identity_no_work(refusing: Bench, method: str, path: str) -> None:
    answer = refusing.run(lambda http: http.request(method, path, content=b"{"), None)
    assert error(answer) == (401, "unauthenticated", None)
    assert refusing.redis.calls == refusing.store.questions == 0


@pytest.mark.parametrize("key", [VIEWER_KEY, RESULTS_KEY])
def test_who_may_only_read_sends_and_cancels_nothing(bench: Bench, key: str) -> None:
    bench.store.record(recorded(1, request_id=ID, at_ms=now_ms()))
    assert error(post(bench, QUESTION, key=key))[0] == 403
    assert error(bench.run(lambda http: http.delete(f"/v1/requests/{ID}"), key))[0] == 403
    assert get(bench, f"/v1/results/{ID}", key).status_code == 200
    assert not bench.submitter.submitted
    assert not bench.submitter.cancelled


def test_who_may_only_send_reads_nothing(bench: Bench) -> None:
    bench.store.record(recorded(1, request_id=ID))
    for path in (f"/v1/results/{ID}", f"/v1/requests/{ID}", f"/v1/requests/{ID}/events", "/v1/requests"):
        assert error(get(bench, path, WORK_KEY))[0] == 403
    assert post(bench, QUESTION, key=WORK_KEY, params={"wait": 10}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/results/{}", "/v1/requests/{}", "/v1/requests/{}/events", "/results/{}"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_anothers_request_is_as_unknown_as_none(bench: Bench, path: str, method: str) -> None:
    if method == "DELETE" and path != "/v1/requests/{}":
        return
    bench.store.record(recorded(1, request_id=ID))
    bench.store.decide(decided(Decision.ACCEPTED, 1))

    async def test(http: httpx.AsyncClient) -> None:
        bench.results.remember([recorded(1, request_id=ID).reply])
        await eventually_async(lambda: bool(bench.redis.stored))
        known = await http.request(method, path.format(ID))
        unknown = await http.request(method, path.format(ID.replace("0", "1")))
        strange = [
            await http.request(method, path.format(name))
            for name in ("1", "..%2f..%2fetc", "%00", "x" * 4_000, "%ff", ID[:-1] + "é", "' OR 1=1 --")
        ]
        assert known.json()["error"] == {"code": "unknown_request", "message": "there is no request with this id"}
        for answer in (unknown, *strange):
            assert answer.status_code == 404
            if answer.headers.get("content-type") and "unknown_request" in answer.text:
                assert answer.json() == known.json()

    bench.run(test, OTHER_KEY)
    assert not bench.submitter.cancelled


def test_a_result_is_told_for_a_day(bench: Bench) -> None:
    reply = recorded(1, request_id=ID, at_ms=DAY_MS)
    bench.store.record(reply)
    bench.now_ms = 2 * DAY_MS
    assert get(bench, f"/v1/results/{ID}").json()["output"] == {"text": "answer 1"}
    assert get(bench, f"/results/{ID}").json()["ended_at_ms"] == DAY_MS
    bench.now_ms += 1
    assert error(get(bench, f"/v1/results/{ID}")) == (404, "result_expired", None)
    assert get(bench, f"/v1/requests/{ID}").json()["status"] == "done"


def test_a_result_that_was_erased_is_gone_at_once_and_its_decisions_are_told(bench: Bench) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1), decided(Decision.CACHED, 9))
    bench.now_ms = DAY_MS
    assert get(bench, f"/v1/requests/{ID}").json()["status"] == "finishing"
    bench.store.erased.add(("globex", ID))
    assert get(bench, f"/v1/results/{ID}").status_code == 202, "of another tenant"
    bench.store.erased.add(("acme", ID))
    assert error(get(bench, f"/v1/results/{ID}")) == (404, "result_erased", None)
    status = get(bench, f"/v1/requests/{ID}").json()
    assert (status["status"], status["is_erased"], status["ended_at_ms"]) == ("done", True, 9)
    assert "outcome" not in status
    assert [event["event"] for event in status["events"]] == ["accepted", "cached"]


def test_a_result_that_was_removed_has_expired_and_its_decisions_are_told(bench: Bench) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1), decided(Decision.CACHED, 9))
    bench.now_ms = DAY_MS
    assert get(bench, f"/v1/results/{ID}").status_code == 202
    bench.now_ms = DAY_MS + 10
    assert error(get(bench, f"/v1/results/{ID}")) == (404, "result_expired", None)
    status = get(bench, f"/v1/requests/{ID}").json()
    assert (status["status"], status["ended_at_ms"]) == ("done", 9)
    assert [event["event"] for event in status["events"]] == ["accepted", "cached"]


def test_a_result_of_whatever_outcome_is_a_result(bench: Bench) -> None:
    bench.store.record(recorded(1, request_id=ID, outcome=Outcome.FAILED, code="poison", output=None))
    bench.now_ms = recorded(1).replied_at_ms
    answer = get(bench, f"/v1/results/{ID}")
    assert answer.status_code == 200
    assert (answer.json()["outcome"], answer.json()["code"]) == ("failed", "poison")


def test_numbers_that_are_none_are_null(bench: Bench) -> None:
    output = Output(embeddings=((float("nan"), 0.5, float("inf")),))
    bench.store.record(recorded(1, request_id=ID, output=output))
    bench.now_ms = recorded(1).replied_at_ms
    assert get(bench, f"/v1/results/{ID}").json()["output"]["embeddings"] == [[None, 0.5, None]]


def test_a_result_that_is_not_there_yet_is_told_so(bench: Bench) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1), decided(Decision.DISPATCHED, 2))
    answer = get(bench, f"/v1/results/{ID}")
    assert (answer.status_code, answer.json()["status"], answer.headers["retry-after"]) == (202, "running", "1")


def test_a_request_is_known_right_after_it_was_accepted(bench: Bench) -> None:
    bench.submitter.scripts.append(Script(before_reply=Gate()))

    async def test(http: httpx.AsyncClient) -> None:
        links = (await http.post("/v1/requests", json=QUESTION)).json()["links"]
        status = (await http.get(links["self"])).json()
        assert (status["status"], status["model"], status["task"]) == ("queued", MODEL, "generate")
        assert (await http.get(links["result"])).status_code == 202

    bench.run(test)


def test_a_request_that_may_be_in_the_log_is_known_to_its_tenant_until_its_reply_comes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.submitter, "new_request_id", lambda: ID)
    bench.submitter.scripts.append(Script(refused=not_confirmed(ID)))

    async def test(http: httpx.AsyncClient) -> None:
        told = (await http.post("/v1/requests", json=QUESTION)).json()["error"]
        assert (told["code"], told["request_id"]) == (UNCERTAIN, ID)
        status = await http.get(f"/v1/requests/{ID}")
        assert (status.status_code, status.json()["status"]) == (200, "queued")
        assert (await http.get(f"/v1/results/{ID}")).status_code == 202
        theirs = await http.get(f"/v1/requests/{ID}", headers={"authorization": f"Bearer {OTHER_KEY}"})
        assert theirs.status_code == 404
        bench.results.remember([recorded(1, request_id=ID, at_ms=now_ms()).reply])
        assert (await http.get(f"/v1/requests/{ID}")).json()["status"] == "done"

    bench.run(test)


def test_a_request_that_was_refused_is_known_to_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.submitter, "new_request_id", lambda: ID)
    bench.submitter.scripts.append(Script(refused=away()))

    async def test(http: httpx.AsyncClient) -> None:
        assert (await http.post("/v1/requests", json=QUESTION)).status_code == 503
        assert (await http.get(f"/v1/requests/{ID}")).status_code == 404

    bench.run(test)


def test_a_status_tells_decisions_with_their_reasons(bench: Bench) -> None:
    bench.now_ms = 10
    bench.store.decide(
        decided(Decision.ACCEPTED, 1, inputs={"predicted_ms": "7"}),
        decided(Decision.REFUSED, 9, code="deadline_unmeetable", message="after 8 ms the deadline cannot be met"),
    )
    status = get(bench, f"/v1/requests/{ID}").json()
    assert status["status"] == "finishing"
    assert [event["event"] for event in status["events"]] == ["accepted", "refused"]
    assert status["events"][0]["details"] == {"predicted_ms": "7"}
    assert status["events"][1]["code"] == "deadline_unmeetable"
    assert status["events"][1]["message"] == "after 8 ms the deadline cannot be met"


def test_a_cancel_is_passed_on_and_what_is_done_stays_done(bench: Bench) -> None:
    bench.store.decide(decided(Decision.ACCEPTED, 1))

    def cancel() -> httpx.Response:
        return bench.run(lambda http: http.delete(f"/v1/requests/{ID}"))

    assert cancel().status_code == 202
    assert bench.submitter.cancelled == [("acme", ID)]
    bench.store.record(recorded(1, request_id=ID))
    answer = cancel()
    assert (answer.status_code, answer.json()["status"], answer.json()["outcome"]) == (200, "done", "ok")
    assert len(bench.submitter.cancelled) == 1


def test_a_cancel_needs_neither_redis_nor_postgres(bench: Bench) -> None:
    bench.away(redis=True, postgres=True)
    assert bench.run(lambda http: http.delete(f"/v1/requests/{ID}")).status_code == 202
    assert bench.submitter.cancelled == [("acme", ID)]


def test_without_postgres_what_redis_has_is_told_and_the_rest_later(bench: Bench) -> None:
    async def test(http: httpx.AsyncClient) -> None:
        bench.results.remember([recorded(1, request_id=ID).reply])
        await eventually_async(lambda: bool(bench.redis.stored))
        bench.away(postgres=True)
        assert (await http.get(f"/v1/results/{ID}")).status_code == 200
        status = (await http.get(f"/v1/requests/{ID}")).json()
        assert (status["status"], [event["event"] for event in status["events"]]) == ("done", ["replied"])
        for path in (f"/v1/results/{ID[::-1]}", "/v1/requests"):
            later = await http.get(f"/v1/results/{ID.replace('0', '1')}" if "results" in path else path)
            assert error(later) == (503, "unavailable", None)
            assert int(later.headers["retry-after"]) >= 1

    bench.run(test)


def ids(page: httpx.Response) -> list[str]:
    return [one["id"] for one in page.json()["data"]]


def test_the_history_is_paged_newest_first_and_stable(bench: Bench) -> None:
    bench.store.record(*(recorded(number, at_ms=1_000 + number // 3) for number in range(10)))
    bench.store.record(recorded(50, "globex"))
    expected = [recorded(number).reply.request_id for number in reversed(range(10))]

    async def test(http: httpx.AsyncClient) -> None:
        seen, cursor = [], None
        while True:
            page = await http.get("/v1/requests", params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
            assert page.status_code == 200
            seen += ids(page)
            # Meanwhile more of them end.
            bench.store.record(recorded(100 + len(seen)))
            cursor = page.json().get("next_cursor")
            assert page.json()["has_more"] == (cursor is not None)
            if cursor is None:
                break
        assert seen == expected

    bench.run(test)


def test_the_history_is_filtered(bench: Bench) -> None:
    bench.store.record(
        recorded(1, at_ms=0),
        recorded(2, at_ms=60_000, outcome=Outcome.FAILED, code="poison"),
        recorded(3, at_ms=120_000, model="other"),
    )

    def found(**query: str) -> list[int]:
        return [int(name, 16) for name in ids(get(bench, "/v1/requests", params=query))]

    assert found() == [3, 2, 1]
    assert found(status="failed") == [2]
    assert found(model="other") == [3]
    assert found(since="1970-01-01T00:01:00Z") == [3, 2]
    assert found(since="1970-01-01T02:01:00+02:00", until="1970-01-01T00:02:00Z") == [2]
    assert get(bench, "/v1/requests").json()["data"][1]["code"] == "poison"
    assert "output" not in get(bench, "/v1/requests").json()["data"][0]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "many"}, "limit"),
        ({"status": "lost"}, "status"),
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-01-01T00:00:00"}, "since"),
        ({"model": ""}, "model"),
        ({"model": "a\0b"}, "model"),
        ({"cursor": "mine"}, "cursor"),
        ({"cursor": "x" * 5_000}, "cursor"),
    ],
)
def test_a_query_that_is_none_is_told_with_its_field(refusing: Bench, query: dict[str, str], field: str) -> None:
    assert error(get(refusing, "/v1/requests", params=query)) == (400, "invalid", field)


def scope_of(path: str, body: bytes) -> dict[str, Any]:
    """A call as a server hands it to the application."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"wait=60" if path == "/v1/requests" else b"",
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"content-length", b"%d" % len(body))],
    }


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/rank", "/v1/classify"])
def test_a_caller_that_goes_away_while_its_body_is_read_is_no_mistake_of_the_gateway(bench: Bench, path: str) -> None:
    statuses: list[int] = []

    async def test(_http: httpx.AsyncClient) -> None:
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said.put_nowait({"type": "http.request", "body": b'{"model"', "more_body": True})
        said.put_nowait({"type": "http.disconnect"})

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        with capture_logs() as lines:
            await CallLog(bench.app)(scope_of(path, b"x" * 100), said.get, send)
        assert [line["event"] for line in lines] == ["call"]
        assert statuses == [CLIENT_CLOSED_REQUEST]
        assert not bench.submitter.submitted

    bench.run(test)


def test_a_caller_that_goes_away_cancels_what_it_waited_for(bench: Bench) -> None:
    bench.submitter.scripts.append(Script(before_reply=Gate()))
    body = json.dumps(QUESTION).encode()
    scope = scope_of("/v1/requests", body)

    async def test(_http: httpx.AsyncClient) -> None:
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(_message: Any) -> None:
            """Nobody takes it."""

        with capture_logs() as lines:
            call = asyncio.create_task(CallLog(bench.app)(scope, said.get, send))
            await eventually_async(lambda: bool(bench.submitter.waiting))
            said.put_nowait({"type": "http.disconnect"})
            await call
        (line,) = [line for line in lines if line["event"] == "call"]
        assert (line["status"], line["outcome"]) == (CLIENT_CLOSED_REQUEST, "abandoned")
        assert bench.submitter.cancelled
        assert bench.submitter.waiting[0].forgotten

    bench.run(test)
