"""The admin API of a secured stack: what each role can and cannot do, over HTTP, with real credentials."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest
from confluent_kafka import Producer
from pydantic import SecretStr

from deploy.local.__main__ import demo_model
from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import DataDir
from deploy.local.services import ADMIN, default_services, default_setup
from deploy.local.stack import LocalStack
from fairlane.clock import now_ms
from fairlane.kafka_config import idempotent_producer
from fairlane.names import DEAD_LETTER_WORK, replies_topic, requests_topic
from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.cli import main
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.redis.client import blocking_redis_client, redis_client
from fairlane_server.redis.rights import RedisRole, redis_user
from fairlane_server.sessions.session import Session, csrf_token_of, new_secret
from fairlane_server.sessions.store import RedisSessions
from producers.gateway.identity.compose import session_limits
from tests.kit.waiting import eventually

T = TypeVar("T")

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 60.0
SECRET = "the prompt that nobody else may read"
LETTER_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"
KEYS: dict[str, str] = {}
ORIGIN = "http://127.0.0.1:8080"
# No login is begun here: the issuer is never asked.
OIDC = {
    "OIDC_ISSUER": "https://login.example/realm",
    "OIDC_CLIENT_ID": "console",
    "OIDC_REDIRECT_URL": f"{ORIGIN}/auth/callback",
    "ADMIN_SESSIONS": "true",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("administered")
    setup = default_setup(DataDir(folder).credentials)
    services = [
        replace(one, env={**one.env, **OIDC}) if one.name == ADMIN else one
        for one in default_services(engine="simulated")
    ]
    with LocalStack(data_dir=folder, secured=True, setup=setup, services=services, environ={}) as running:
        with ApiKeys(running.endpoints.postgres_owner_dsn) as keys:
            for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN):
                KEYS[role] = keys.create(DEPLOYMENT, f"a {role}", role).text
            KEYS["tenant"] = keys.create("acme", "a tenant's").text
            KEYS["reader"] = keys.create(
                DEPLOYMENT, "may read", Role.OPERATOR, grants=[Permission.DEAD_LETTERS_PAYLOAD]
            ).text
            KEYS["identities"] = keys.create(DEPLOYMENT, "keys only", Role.ADMIN, [Scope.IDENTITIES]).text
        yield running


@contextmanager
def client(stack: LocalStack, who: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEYS[who]}"}
    url = f"{stack.endpoints.admin_url}/v1/admin"
    with httpx.Client(base_url=url, headers=headers, timeout=WAIT_S) as made:
        yield made


def ask(stack: LocalStack, key: str, tenant_model: str) -> httpx.Response:
    """A call of the gateway."""
    return httpx.post(
        f"{stack.endpoints.gateway_url}/v1/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": tenant_model, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]},
        timeout=WAIT_S,
    )


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body.get("field")


def test_a_tenant_is_created_called_for_and_removed(stack: LocalStack) -> None:
    with client(stack, Role.ADMIN) as admin:
        made = admin.put("/tenants/hooli", json={"weight": 2, "quotas": {"tokens_per_day": 100_000}})
        assert made.status_code == 201, made.text
        assert made.json()["settings"]["quotas"] == {"tokens_per_day": 100_000}
        assert made.json()["managed_by"] == "api"
        issued = admin.post("/keys", json={"tenant": "hooli", "name": "first"})
        assert issued.status_code == 201, issued.text
        key, key_id = issued.json()["api_key"], issued.json()["key"]["key_id"]
        assert key not in admin.get("/keys", params={"tenant": "hooli"}).text
        eventually(lambda: ask(stack, key, demo_model()).status_code == 200, WAIT_S, "an answer for the new tenant")
        rotated = admin.post(f"/keys/{key_id}/rotate", json={"overlap_ms": 60_000})
        assert rotated.status_code == 201, rotated.text
        assert {ask(stack, one, demo_model()).status_code for one in (key, rotated.json()["api_key"])} == {200}
        assert admin.delete(f"/keys/{key_id}").json()["revoked_at_ms"] > 0
        eventually(lambda: ask(stack, key, demo_model()).status_code == 401, what="the end of the revoked key")
        etag = made.headers["etag"]
        assert error(admin.put("/tenants/hooli", json={"weight": 3})) == (428, "precondition_required", "if-match")
        changed = admin.put("/tenants/hooli", json={"weight": 3}, headers={"if-match": etag})
        assert (changed.status_code, changed.json()["settings"]["weight"]) == (200, 3.0)
        assert error(admin.delete("/tenants/hooli", headers={"if-match": etag})) == (
            *(412, "precondition_failed"),
            "if-match",
        )
        removed = admin.delete("/tenants/hooli", headers={"if-match": changed.headers["etag"]})
        assert removed.json()["revoked_keys"] == [rotated.json()["key"]["key_id"]]
        assert admin.get("/tenants/hooli").status_code == 404
        refused = admin.put("/tenants/hooli", json={})
        assert error(refused) == (409, "conflict", None)
        for part in ("it is barred", "topics ", "requests.hooli", "`restore=true`", "`fairlane access apply --delete`"):
            assert part in refused.json()["error"]["message"]
        assert error(admin.post("/keys", json={"tenant": "hooli", "name": "again"})) == (400, "invalid", "tenant")
        audit = admin.get("/audit", params={"tenant": "hooli"}).json()["data"]
        # The same customer comes back.
        assert admin.put("/tenants/hooli", json={}, params={"restore": "true"}).status_code == 201
        assert admin.post("/keys", json={"tenant": "hooli", "name": "again"}).status_code == 201
        revoked = rotated.json()["api_key"]
        assert ask(stack, revoked, demo_model()).status_code == 401
    said = [(one["event"], one["outcome"]) for one in reversed(audit)]
    assert said == [
        ("tenant_set", "started"),
        ("tenant_set", "done"),
        ("api_key_created", "done"),
        ("api_key_rotated", "done"),
        ("api_key_revoked", "done"),
        ("tenant_set", "started"),
        ("tenant_set", "done"),
        ("tenant_removed", "started"),
        ("tenant_barred", "done"),
        ("api_key_revoked", "done"),
        ("tenant_removed", "done"),
    ]
    assert {re.fullmatch("key:[0-9a-f]{16}", one["author"]) is None for one in audit} == {False}
    (first, second) = [one["details"] for one in reversed(audit) if (one["event"], one["outcome"]) == said[0]]
    assert (first.get("before"), first["after"]["weight"], second["before"]["weight"]) == (None, 2.0, 2.0)
    assert key[20:] not in json.dumps(audit)


def test_a_tenant_of_the_file_is_left_alone_until_it_is_adopted(stack: LocalStack) -> None:
    with client(stack, Role.ADMIN) as admin:
        known = admin.get("/tenants/globex")
        assert known.json()["managed_by"] == "file"
        condition = {"if-match": known.headers["etag"]}
        wanted = known.json()["settings"] | {"weight": 7}
        assert error(admin.put("/tenants/globex", json=wanted, headers=condition))[:2] == (409, "conflict")
        adopted = admin.put("/tenants/globex", json=wanted, headers=condition, params={"adopt": "true"})
        assert (adopted.status_code, adopted.json()["managed_by"]) == (200, "api")
        assert admin.get("/tenants").json()["data"][1]["settings"]["weight"] == 7.0


def test_what_is_wrong_is_named(stack: LocalStack) -> None:
    user = {"tenant": "acme", "subject": "https://id.test/u-1", "role": "viewer"}
    with client(stack, Role.ADMIN) as admin:
        assert admin.put("/users", json=user).json()["subject"] == user["subject"]
        assert [one["subject"] for one in admin.get("/users").json()["data"]] == [user["subject"]]
        wrong = {
            ("PUT", "/tenants/dunder", '{"wieght": 2}'): "wieght",
            ("PUT", "/tenants/dunder", '{"quotas": {"tokens_per_day": -1}}'): "quotas.tokens_per_day",
            ("PUT", "/tenants/dunder", "nonsense"): "body",
            ("PUT", "/tenants/Hooli", "{}"): "tenant",
            ("POST", "/keys", '{"tenant": "acme", "name": "x", "role": "root"}'): "role",
            ("POST", "/keys", '{"tenant": "acme", "name": "x", "role": "operator"}'): "role",
            ("POST", "/keys", '{"tenant": "acme", "name": "x", "scopes": ["audit"]}'): "scopes",
            ("POST", "/keys", '{"tenant": "acme", "name": "x", "user": "nobody"}'): "user",
            ("POST", "/keys", '{"name": "x"}'): "tenant",
            ("PUT", "/users", json.dumps(user | {"grants": ["dead_letters:payload"]})): "grants",
            ("PUT", "/users", json.dumps(user | {"subject": ""})): "subject",
            ("DELETE", "/keys/nothing", ""): "key_id",
            ("GET", "/keys?limit=0", ""): "limit",
            ("GET", "/keys?cursor=x", ""): "cursor",
            ("GET", "/audit?since=yesterday", ""): "since",
            ("POST", "/dead-letters/replay", '{"dry_run": true}'): "all",
            ("POST", "/dead-letters/replay", '{"all": true}'): "dry_run",
            ("POST", "/dead-letters/purge", '{"dry_run": true, "topic": "work"}'): "until",
            ("GET", "/dead-letters/elsewhere/0/0", ""): "topic",
        }
        for (method, path, body), field in wrong.items():
            answer = admin.request(method, path, content=body)
            assert error(answer)[::2] == (400, field), (method, path, answer.text)


def test_a_tenants_key_crosses_nowhere(stack: LocalStack) -> None:
    document = httpx.get(f"{stack.endpoints.admin_url}/openapi.json", timeout=WAIT_S).json()
    tried = 0
    for path, methods in document["paths"].items():
        if not path.startswith("/v1/admin"):
            continue
        place = path.replace("{topic}", "work").replace("{partition}", "0").replace("{offset}", "0")
        place = re.sub(r"\{[a-z_]+\}", "0123456789abcdef", place).removeprefix("/v1/admin")
        for method in methods:
            with client(stack, "tenant") as tenant:
                assert tenant.request(method, place).status_code == 403, (method, path)
                assert tenant.request(method, place, headers={"authorization": ""}).status_code == 401
            tried += 1
    assert tried >= 17
    # Nor does an identity of the deployment act for a tenant.
    for who in (Role.VIEWER, Role.OPERATOR, Role.ADMIN):
        assert ask(stack, KEYS[who], demo_model()).status_code == 403


def test_nobody_gives_more_than_he_has(stack: LocalStack) -> None:
    with client(stack, "identities") as keeper:
        assert keeper.post("/keys", json={"tenant": "acme", "name": "x"}).status_code == 201
        more = {"tenant": DEPLOYMENT, "name": "x", "role": "admin"}
        assert keeper.post("/keys", json=more).status_code == 403
        same = keeper.post("/keys", json=more | {"scopes": ["identities"]})
        assert same.status_code == 201
        assert keeper.put("/users", json={"tenant": DEPLOYMENT, "subject": "me", "role": "admin"}).status_code == 403
        whole = KEYS[Role.ADMIN].split("_")[1]
        assert keeper.post(f"/keys/{whole}/rotate", json={}).status_code == 403
        assert keeper.get("/tenants").status_code == 403


def test_a_viewer_reads_and_changes_nothing(stack: LocalStack) -> None:
    with client(stack, Role.VIEWER) as viewer:
        for path in ("/tenants", "/models", "/loads", "/dead-letters"):
            assert viewer.get(path).status_code == 200, path
        for method, path in (
            *(("PUT", "/tenants/dunder"), ("DELETE", "/tenants/acme"), ("POST", "/keys"), ("GET", "/keys")),
            *(("POST", "/dead-letters/replay"), ("POST", "/dead-letters/purge"), ("GET", "/audit")),
        ):
            assert viewer.request(method, path, content="{}").status_code == 403, path
        models = viewer.get("/models").json()["data"]
        assert demo_model() in {one["reference"] for one in models}
        eventually(lambda: viewer.get("/loads").json()["pools"], what="a report of the pools")


def write_letter(stack: LocalStack) -> int:
    """A dead letter of acme's, and its offset."""
    settings = stack.endpoints.kafka_settings(ADMIN_USER)
    request = InferenceRequest(LETTER_ID, demo_model(), "generate", RequestInput(prompt=SECRET), tenant="acme")
    now = now_ms()
    work = WorkItem(
        *(request, "acme", "generate", "1", "normal", 10, now, now, now, now + 60_000),
        *(replies_topic("acme"), "dispatcher-1", SourceCoordinate(requests_topic("acme"), 0, 0)),
    )
    places: list[int] = []
    producer = Producer(idempotent_producer(settings))
    producer.produce(
        DEAD_LETTER_WORK,
        key=LETTER_ID,
        value=codec_for(settings).encode(work),
        on_delivery=lambda _error, message: places.append(message.offset() or 0),
    )
    producer.flush(30)
    return places[0]


def test_an_operator_replays_what_it_cannot_read(stack: LocalStack) -> None:
    offset = write_letter(stack)
    place = f"/dead-letters/work/0/{offset}"
    with client(stack, Role.OPERATOR) as operator:
        listed = operator.get("/dead-letters", params={"tenant": "acme"})
        assert [one["offset"] for one in listed.json()["data"]] == [offset]
        whole = operator.get(place)
        assert (whole.status_code, whole.json()["content"]["tenant"]) == (200, "acme")
        assert SECRET not in listed.text + whole.text
        assert operator.get(f"{place}/payload").status_code == 403
        looked = operator.post("/dead-letters/replay", json={"dry_run": True, "tenant": "acme"}).json()
        assert (looked["results"][0]["result"], looked["left"]) == ("would be replayed", 0)
        sent = operator.post("/dead-letters/replay", json={"dry_run": False, "tenant": "acme"}).json()
        assert sent["results"][0]["result"] == "replayed", sent
        assert sent["results"][0]["replay_of"] == LETTER_ID
        again = operator.post("/dead-letters/replay", json={"dry_run": False, "tenant": "acme"}).json()
        assert (again["results"], again["replayed_before"]) == ([], 1)
        (row,) = operator.get("/dead-letters", params={"tenant": "acme"}).json()["data"]
        assert row["replayed_as"] == [sent["results"][0]["request_id"]]
        purge = {"dry_run": False, "topic": "work", "last_offset": offset}
        assert operator.post("/dead-letters/purge", json=purge).status_code == 403
    with client(stack, "reader") as reader:
        assert SECRET in reader.get(f"{place}/payload").text
    with client(stack, Role.ADMIN) as admin:
        looked = admin.post("/dead-letters/purge", json=purge | {"dry_run": True}).json()
        assert (looked["cuts"][0]["letters"], looked["cuts"][0]["replayed"]) == (1, 1)
        assert admin.get(place).status_code == 200
        assert admin.post("/dead-letters/purge", json=purge).json()["cuts"] == looked["cuts"]
        assert admin.get(place).status_code == 404
        events: list[dict[str, Any]] = admin.get("/audit").json()["data"]
    kinds = [(one["event"], one["outcome"]) for one in events if one["event"].startswith("dead_letter")]
    assert kinds == [
        ("dead_letters_purged", "done"),
        ("dead_letters_purged", "started"),
        ("dead_letter_payload_read", "done"),
        ("dead_letters_replayed", "done"),
        ("dead_letters_replayed", "started"),
        ("dead_letters_replayed", "done"),
        ("dead_letters_replayed", "started"),
    ]
    assert SECRET not in json.dumps(events)
    assert DEAD_LETTER_WORK in json.dumps(events)


def with_sessions(stack: LocalStack, use: Callable[[RedisSessions], Awaitable[T]]) -> T:
    """Calls of the store of sessions, as the gateway."""

    async def run() -> T:
        url = stack.endpoints.redis_env(redis_user(RedisRole.GATEWAY))["REDIS_URL"]
        redis = WatchedRedis.of(redis_client(SecretStr(url), WAIT_S), WAIT_S)
        assert redis is not None
        try:
            limits = session_limits(Settings())
            return await use(RedisSessions(redis.client, redis.watch, WAIT_S, limits, now_ms))
        finally:
            await redis.close()

    return asyncio.run(run())


def log_in(stack: LocalStack, subject: str, tenant: str = DEPLOYMENT) -> dict[str, str]:
    """What our own page sends in a session that the gateway began. What it says of a role of the deployment counts for
    nothing."""
    session_id, now = new_secret(), now_ms()
    session = Session(tenant, subject, Role.ADMIN, now, now)
    with_sessions(stack, lambda sessions: sessions.create(session_id, session))
    return {
        "cookie": f"fairlane-session={session_id}",
        "x-csrf-token": csrf_token_of(session_id),
        "origin": ORIGIN,
        "sec-fetch-site": "same-origin",
    }


def test_a_browser_administers_with_the_session_that_began_at_the_gateway(stack: LocalStack) -> None:
    with client(stack, Role.ADMIN) as admin:
        for subject, role in (("anna", "admin"), ("vera", "viewer")):
            entry = {"tenant": DEPLOYMENT, "subject": subject, "role": role}
            assert admin.put("/users", json=entry).status_code == 200
    page, viewer = log_in(stack, "anna"), log_in(stack, "vera")
    foreign, unknown = log_in(stack, "tom", "acme"), log_in(stack, "nobody")
    user = {"tenant": "acme", "subject": "u-9", "role": "viewer"}
    url = f"{stack.endpoints.admin_url}/v1/admin"
    with httpx.Client(base_url=url, timeout=WAIT_S) as browser:
        assert browser.get("/tenants", headers={"cookie": page["cookie"]}).status_code == 200
        assert browser.get("/tenants", headers=viewer).status_code == 200
        for other in (foreign, unknown):
            assert error(browser.get("/tenants", headers=other))[:2] == (403, "forbidden")
        for spoilt in (
            {"cookie": page["cookie"]},
            page | {"origin": "https://evil.example"},
            page | {"sec-fetch-site": "same-site"},
            page | {"x-csrf-token": viewer["x-csrf-token"]},
        ):
            assert error(browser.put("/users", json=user, headers=spoilt))[:2] == (403, "csrf_failed")
        assert error(browser.put("/users", json=user, headers=viewer))[:2] == (403, "forbidden")
        assert browser.put("/users", json=user, headers=page).status_code == 200
        latest = browser.get("/audit", params={"limit": 1}, headers=page).json()["data"][0]
        assert (latest["event"], latest["author"], latest["subject"]) == ("user_set", "user:anna", "u-9")

        # It ends at once, and with its user.
        assert with_sessions(stack, lambda sessions: sessions.end_all(DEPLOYMENT, "vera")) == 1
        assert error(browser.get("/tenants", headers=viewer))[:2] == (401, "no_session")
        viewer = log_in(stack, "vera")
        assert browser.get("/tenants", headers=viewer).status_code == 200
        off = {"tenant": DEPLOYMENT, "subject": "vera", "role": "viewer", "disabled": True}
        assert browser.put("/users", json=off, headers=page).status_code == 200
        eventually(lambda: browser.get("/tenants", headers=viewer).status_code == 403, what="the refusal of the user")
        assert with_sessions(stack, lambda sessions: sessions.list(DEPLOYMENT, "vera")) == []
    with blocking_redis_client(SecretStr(stack.endpoints.redis_url), WAIT_S) as operator:
        # What the user of the admin API on Redis may do is enough.
        assert operator.acl_log(128) == []


def test_pages_follow_one_another(stack: LocalStack) -> None:
    with client(stack, Role.ADMIN) as admin:
        seen: list[int] = []
        cursor: dict[str, str] = {}
        while True:
            page = admin.get("/audit", params={"limit": 3, **cursor}).json()
            seen += [one["event_id"] for one in page["data"]]
            if not page["has_more"]:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert seen == sorted(seen, reverse=True)
        assert len(seen) == len({*seen}) > 10
        assert error(admin.get("/audit", params={"limit": 3, "tenant": "acme", **cursor})) == (400, "invalid", "cursor")


def test_the_command_shows_the_same_audit(
    stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTGRES_OWNER_DSN", stack.endpoints.postgres_owner_dsn)
    with pytest.raises(SystemExit) as ended:
        main(["audit", "--limit", "100", "--json"])
    assert ended.value.code == 0
    shown = [one["event_id"] for one in json.loads(capsys.readouterr().out)["events"]]
    with client(stack, Role.ADMIN) as admin:
        assert shown == [one["event_id"] for one in admin.get("/audit", params={"limit": 100}).json()["data"]]
