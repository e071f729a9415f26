"""Conversations over HTTP, and the right to be forgotten: what is erased is nowhere, and does not come back."""

import json
import threading
from hashlib import sha256

import pytest
from starlette.testclient import TestClient

from fairlane.clock import now_ms
from fairlane_server.erasure import erasures
from fairlane_server.erasure.erasures import ERASURE_LOCK, ErasureKind, Erasures, unfinished
from fairlane_server.postgres.connection import act_for, connect
from producers.gateway.conversations import deps
from producers.gateway.openai.batch_deps import MOST_CALLS_OF_TENANT
from tests.kit.erasure_kit import ErasureBench, reply
from tests.kit.own_redis import OwnRedis
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

SECRET = "zebrafinch"
SECOND_MS = 1_000


@pytest.fixture
def bench(migrated: PostgresServer, own_redis: OwnRedis) -> ErasureBench:
    return ErasureBench(migrated, own_redis.url)


def talk(bench: ErasureBench, conversation: str, count: int, word: str = SECRET, tenant: str = "acme") -> None:
    """A conversation, recorded; its requests were sent a second apart, the last a second ago."""
    now = now_ms()
    bench.record(
        [
            reply(
                f"{conversation}-{number}",
                conversation,
                f"what is a {word}?",
                f"a {word} is {number}",
                now - (count - number) * SECOND_MS,
                tenant,
            )
            for number in range(count)
        ]
    )


def turns(client: TestClient, conversation: str, limit: int = 50) -> list[str]:
    """Its answers, page by page."""
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = client.get(f"/v1/conversations/{conversation}", params={"limit": limit, **cursor})
        assert page.status_code == 200, page.text
        body = page.json()
        assert len(body["data"]) <= limit
        found += [turn["answer"] for turn in body["data"]]
        if not body["has_more"]:
            return found
        cursor = {"cursor": body["next_cursor"]}


def cached(bench: ErasureBench, conversation: str, count: int) -> None:
    """The replies of a conversation in Redis, as gateways have them there."""
    replies = [one for one in bench.log if one.turn is not None and one.turn.conversation_id == conversation]
    bench.remember(replies)
    eventually(lambda: len([p for p in bench.found("cache:result") if "redis:" in p]) >= count, what="the entries")


def test_conversations_are_listed_read_and_exported_by_their_tenant_alone(bench: ErasureBench) -> None:
    talk(bench, "orders", 5)
    talk(bench, "bills", 1)
    talk(bench, "orders", 1, "parrot", tenant="globex")
    with bench.client() as client:
        page = client.get("/v1/conversations", params={"limit": 1}).json()
        assert [(one["id"], one["turns"]) for one in page["data"]] == [("bills", 1)]
        after = client.get("/v1/conversations", params={"limit": 1, "cursor": page["next_cursor"]}).json()
        assert [(one["id"], one["turns"], after["has_more"]) for one in after["data"]] == [("orders", 5, False)]
        in_order = [f"a {SECRET} is {number}" for number in range(5)]
        assert turns(client, "orders", limit=2) == turns(client, "orders") == in_order
        export = client.get("/v1/conversations/orders/export")
        lines = [json.loads(line) for line in export.text.splitlines()]
        assert export.headers["content-type"].startswith("application/jsonl")
        assert [line["answer"] for line in lines] == in_order
        assert lines[0]["messages"] == [{"role": "user", "content": f"what is a {SECRET}?"}]
        foreign = client.get("/v1/conversations/bills", params={"cursor": page["next_cursor"]})
        assert foreign.status_code == 400
    with bench.client("globex") as other:
        assert turns(other, "orders") == ["a parrot is 0"]
        told = [
            (answer.status_code, answer.text)
            for path in ("/v1/conversations/bills", "/v1/conversations/bills/export")
            for answer in (other.get(path), other.get(path.replace("bills", "nothing")))
        ]
        told += [
            (answer.status_code, answer.text)
            for answer in (other.delete("/v1/conversations/bills"), other.delete("/v1/conversations/nothing"))
        ]
        assert len(set(told)) == 1
        assert told[0][0] == 404


def test_long_turns_make_short_pages(bench: ErasureBench) -> None:
    now = now_ms()
    bench.record([reply(f"r-{n}", "long", "x" * 250_000, f"{n}" + "y" * 250_000, now - n) for n in range(9, 0, -1)])
    with bench.client() as client:
        first = client.get("/v1/conversations/long", params={"limit": 50}).json()
        assert 1 <= len(first["data"]) < 9
        assert [answer[0] for answer in turns(client, "long")] == [str(n) for n in range(9, 0, -1)]
        assert len(client.get("/v1/conversations/long/export").text.splitlines()) == 9


def test_what_is_erased_is_nowhere_and_does_not_come_back(bench: ErasureBench) -> None:
    talk(bench, "orders", 3)
    talk(bench, "bills", 2, "parrot")
    with bench.client() as client:
        cached(bench, "orders", 3)
        assert {"postgres:conversation_turns", "postgres:results"} < {*bench.found(SECRET)}
        answer = client.delete("/v1/conversations/orders")
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert (said["status"], said["erased"]) == ("done", {"turns": 3, "results": 3})
        assert said["requested_by"] == "key:0a1b2c3d4e5f6071"
        assert said["subject_sha256"] == sha256(b"orders").hexdigest()
        assert said["gone_by_ms"] == max(one["gone_by_ms"] for one in said["expires"])
        assert {"topic:replies.acme", "topic:requests.acme", "redis:result"} < {one["store"] for one in said["expires"]}
        assert bench.found(SECRET) == []
        # Not even its name or the ids of its requests.
        assert bench.found("orders-") == []
        assert bench.found('"orders"') == []
        assert client.get("/v1/conversations/orders").status_code == 404
        assert client.delete("/v1/conversations/orders").status_code == 404
        assert turns(client, "bills") == ["a parrot is 0", "a parrot is 1"]
        assert client.get(f"/v1/erasures/{said['id']}").json() == said
        assert [one["id"] for one in client.get("/v1/erasures").json()["data"]] == [said["id"]]
    bench.read_log_again()
    assert bench.found(SECRET) == []
    assert "postgres:conversation_turns" in bench.found("parrot")
    with bench.client("globex") as other:
        assert other.get(f"/v1/erasures/{said['id']}").status_code == 404
        assert other.get("/v1/erasures").json()["data"] == []


def test_what_was_under_way_is_not_stored_and_what_is_sent_later_is(bench: ErasureBench) -> None:
    with bench.client() as client:
        before = now_ms()
        answer = client.post("/v1/erasures", json={"conversation_id": "orders"})
        assert (answer.status_code, answer.json()["erased"]) == (200, {"turns": 0, "results": 0})
        bench.record([reply("late", "orders", SECRET, SECRET, before - SECOND_MS)])
        assert bench.found(SECRET) == []
        bench.record([reply("new", "orders", "hello", "parrot", now_ms() + SECOND_MS)])
        assert turns(client, "orders") == ["parrot"]


def known_as_erased(bench: ErasureBench, *request_ids: str, tenant: str = "acme") -> list[bool]:
    """Whether the gateway is told that requests with these ids were erased."""
    with connect(bench.database.gateway_dsn, "test") as connection:
        act_for(connection, tenant)
        asked = [connection.execute("SELECT request_is_erased(%s)", (one,)).fetchone() for one in request_ids]
    return [row is not None and bool(row[0]) for row in asked]


def test_requests_of_an_erased_conversation_are_known_by_their_ids_to_their_tenant_alone(bench: ErasureBench) -> None:
    talk(bench, "orders", 2)
    talk(bench, "bills", 1)
    ids = ("orders-0", "orders-1", "late")
    with bench.client() as client:
        assert known_as_erased(bench, *ids) == [False, False, False]
        assert client.delete("/v1/conversations/orders").status_code == 200
        assert known_as_erased(bench, *ids, "bills-0") == [True, True, False, False]
        # It was under way, and comes now.
        bench.record([reply("late", "orders", SECRET, SECRET, now_ms() - 60 * SECOND_MS)])
        assert known_as_erased(bench, *ids, "bills-0") == [True, True, True, False]
        assert client.post("/v1/erasures", json={"request_ids": ["bills-0"]}).status_code == 200
        assert known_as_erased(bench, "bills-0") == [True]
    assert known_as_erased(bench, *ids, "bills-0", tenant="globex") == [False] * 4
    bench.read_log_again()
    assert known_as_erased(bench, *ids) == [True, True, True]
    assert bench.found(SECRET) == []


def test_single_requests_are_erased_with_their_turns(bench: ErasureBench) -> None:
    talk(bench, "orders", 2)
    bench.record([reply("alone", None, "", SECRET, now_ms() - SECOND_MS)])
    with bench.client() as client:
        answer = client.post("/v1/erasures", json={"request_ids": ["alone", "orders-0", "unknown"]})
        assert (answer.status_code, answer.json()["erased"]) == (200, {"turns": 1, "results": 2})
        assert turns(client, "orders") == [f"a {SECRET} is 1"]
        assert bench.found("alone") == []
    bench.read_log_again()
    with bench.client() as client:
        assert turns(client, "orders") == [f"a {SECRET} is 1"]
    assert bench.found("alone") == []


def test_the_replays_of_a_dead_letter_are_erased_with_their_request(bench: ErasureBench) -> None:
    now = now_ms()
    bench.record([reply("again", "orders", SECRET, SECRET, now - SECOND_MS, replay_of="first")])
    bench.record([reply("other", "orders", "hello", "parrot", now - SECOND_MS, replay_of="second")])
    with bench.client() as client:
        answer = client.post("/v1/erasures", json={"request_ids": ["first"]})
        assert (answer.status_code, answer.json()["erased"]) == (200, {"turns": 1, "results": 1})
        bench.record([reply("once-more", "orders", SECRET, SECRET, now_ms() + SECOND_MS, replay_of="first")])
        assert bench.found(SECRET) == []
        assert turns(client, "orders") == ["parrot"]
        assert client.delete("/v1/conversations/orders").status_code == 200
        later = now_ms() + SECOND_MS
        bench.record([reply("late", "orders", SECRET, SECRET, later, replay_of="third")])
        bench.record([reply("new", "orders", "hello", "sparrow", later)])
        assert turns(client, "orders") == ["sparrow"]
    assert bench.found(SECRET) == []


@pytest.mark.parametrize(
    "body", [{}, {"conversation_id": ""}, {"request_ids": []}, {"conversation_id": "a", "request_ids": ["b"]}, {"x": 1}]
)
def test_an_erasure_names_one_thing(bench: ErasureBench, body: dict[str, object]) -> None:
    with bench.client() as client:
        assert client.post("/v1/erasures", json=body).status_code == 400


def test_who_may_read_only_erases_nothing(bench: ErasureBench) -> None:
    talk(bench, "orders", 1)
    with bench.client("acme:viewer") as client:
        assert client.delete("/v1/conversations/orders").status_code == 403
        assert client.post("/v1/erasures", json={"conversation_id": "orders"}).status_code == 403
        assert turns(client, "orders") == [f"a {SECRET} is 0"]


def test_an_erasure_whose_gateway_was_killed_goes_on(bench: ErasureBench) -> None:
    talk(bench, "orders", 3)
    with bench.client() as client:
        cached(bench, "orders", 3)
        # Killed behind the rows, before the caches.
        with Erasures(bench.database.gateway_dsn, "acme", 60_000) as erasures:
            erasure_id = erasures.request(ErasureKind.CONVERSATION, ["orders"], "key:1")
            assert len(erasures.step(erasure_id)) == 3
        assert {place.partition(":")[0] for place in bench.found(SECRET)} == {"redis"}
        assert unfinished(bench.database.gateway_dsn, 0, 10) == [("acme", erasure_id)]
        assert unfinished(bench.database.gateway_dsn, 60, 10) == []
        bench.carry_out(client, erasure_id)
        assert client.get(f"/v1/erasures/{erasure_id}").json()["status"] == "done"
    assert bench.found(SECRET) == []
    assert unfinished(bench.database.gateway_dsn, 0, 10) == []


def test_without_redis_an_erasure_is_recorded_and_goes_on_when_it_is_back(
    bench: ErasureBench, own_redis: OwnRedis
) -> None:
    talk(bench, "orders", 1)
    with bench.client() as client:
        own_redis.kill()
        answer = client.delete("/v1/conversations/orders")
        assert (answer.status_code, answer.json()["status"]) == (202, "erasing")
        assert client.get("/v1/conversations/orders").status_code in (200, 404)
        own_redis.start()

        def is_done() -> bool:
            bench.carry_out(client, answer.json()["id"])
            return bool(client.get(f"/v1/erasures/{answer.json()['id']}").json()["status"] == "done")

        eventually(is_done, what="the end of the erasure")
    assert bench.found(SECRET) == []


def test_no_row_slips_in_behind_an_erasure(bench: ErasureBench) -> None:
    """A recorder that looked for tombstones before there were any commits before the erasure looks for rows."""
    erased = threading.Event()
    with bench.client() as client, connect(bench.database.recorder_dsn, "test") as recorder:
        act_for(recorder, "*")
        recorder.execute("SELECT pg_advisory_xact_lock_shared(%s)", (ERASURE_LOCK,))

        def erase() -> None:
            assert client.post("/v1/erasures", json={"conversation_id": "orders"}).status_code == 200
            erased.set()

        thread = threading.Thread(target=erase)
        thread.start()
        waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        eventually(lambda: bench.rows(waiting) == [(1,)], what="the erasure to wait")
        # It is counted and written before it waits for the lock: who waits behind it waits for its tombstones alone.
        written = (
            "SELECT count(*) FROM pg_locks AS waits JOIN pg_locks AS holds USING (pid) WHERE NOT waits.granted "
            "AND holds.relation = 'erasures'::regclass AND holds.mode = 'RowExclusiveLock'"
        )
        assert bench.rows(written) == [(1,)]
        recorder.execute(
            "INSERT INTO conversation_turns (tenant, conversation_id, request_id, source_topic, source_partition, "
            "source_offset, submitted_at_ms, replied_at_ms, messages, answer, tokens) "
            "VALUES ('acme', 'orders', 'r', 't', 0, 0, 1, 1, '[]', %s, 1)",
            (SECRET,),
        )
        assert not erased.is_set()
        recorder.commit()
        thread.join(30)
        assert erased.is_set()
    assert bench.found(SECRET) == []


def test_erasures_of_one_tenant_leave_threads_to_others(bench: ErasureBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deps, "_AT_A_TIME_S", 600.0)
    talk(bench, "orders", 1)
    talk(bench, "bills", 1, "parrot", tenant="globex")
    answers: list[int] = []
    with bench.client() as client, connect(bench.database.owner_dsn, "test") as holder:
        act_for(holder, "acme")
        holder.execute("SELECT FROM conversation_turns WHERE tenant = 'acme' FOR UPDATE")

        def erase() -> None:
            answers.append(client.post("/v1/erasures", json={"conversation_id": "orders"}).status_code)

        threads = [threading.Thread(target=erase) for _ in range(MOST_CALLS_OF_TENANT)]
        for thread in threads:
            thread.start()
        waiting = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        eventually(lambda: bench.rows(waiting) == [(MOST_CALLS_OF_TENANT,)], what="the erasures to wait for a row")
        threads.append(threading.Thread(target=erase))
        threads[-1].start()
        eventually(lambda: answers == [429], what="the refusal of one more")
        others = client.get("/v1/conversations", headers={"authorization": "Bearer globex"})
        assert [one["id"] for one in others.json()["data"]] == ["bills"]
        holder.rollback()
        for thread in threads:
            thread.join(30)
    assert sorted(answers) == [200] * MOST_CALLS_OF_TENANT + [429]
    assert bench.found(SECRET) == []


def test_a_tenant_has_a_bounded_number_of_names_erased(bench: ErasureBench) -> None:
    bench.most_erased = 3
    with bench.client() as client:
        assert client.post("/v1/erasures", json={"request_ids": ["a", "b"]}).status_code == 200
        refused = client.post("/v1/erasures", json={"request_ids": ["c", "d"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
        assert bench.rows("SELECT count(*) FROM erased") == [(2,)]
        assert client.post("/v1/erasures", json={"conversation_id": "c"}).status_code == 200
        other = client.post("/v1/erasures", json={"request_ids": ["d"]}, headers={"authorization": "Bearer globex"})
        assert other.status_code == 200
    assert bench.rows("SELECT count(*) FROM erasures") == [(3,)]


def test_a_tenant_has_a_bounded_number_of_erasures_under_way(
    bench: ErasureBench, own_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "MOST_UNDER_WAY", 2)
    with bench.client() as client:
        own_redis.kill()
        answers = [client.post("/v1/erasures", json={"request_ids": [name]}) for name in "abc"]
        assert [answer.status_code for answer in answers] == [202, 202, 429]
        assert answers[-1].json()["error"]["code"] == "overloaded"
        assert int(answers[-1].headers["retry-after"]) > 0


def test_a_long_erasure_is_answered_before_its_end_and_goes_on(
    bench: ErasureBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasures, "STEP", 1)
    monkeypatch.setattr(deps, "_AT_A_TIME_S", 0.0)
    talk(bench, "orders", 3)
    with bench.client() as client:
        answer = client.delete("/v1/conversations/orders")
        assert (answer.status_code, answer.json()["status"]) == (202, "erasing")
        assert answer.json()["erased"]["turns"] == 1
        for _ in range(3):
            bench.carry_out(client, answer.json()["id"])
        assert client.get(f"/v1/erasures/{answer.json()['id']}").json()["status"] == "done"
    assert bench.found(SECRET) == []


def test_the_gateway_cannot_change_what_was_erased(bench: ErasureBench) -> None:
    with connect(bench.database.gateway_dsn, "test") as connection:
        for statement in (
            "DELETE FROM erasures",
            "UPDATE erasures SET turns = 0",
            "DELETE FROM erased",
            "SELECT * FROM erased",
            "DELETE FROM conversation_turns",
            "DELETE FROM results",
        ):
            with pytest.raises(Exception, match="permission denied"):
                connection.execute(statement.encode())
            connection.rollback()
