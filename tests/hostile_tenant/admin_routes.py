"""Tries on the admin API: a server of its own, called with everything that a tenant could show.

The keys are in Postgres and the tokens are an issuer's, so that what refuses them is what a deployment has.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from urllib.parse import quote

import httpx

from deploy.local.ports import PortClaims
from deploy.local.services import HOST, Service
from fairlane.clock import now_ms
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.api_keys.permissions import GRANTABLE
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from tests.hostile_tenant.cluster import PLAIN, Cluster
from tests.hostile_tenant.drawing import CHANGES
from tests.hostile_tenant.operation import Target
from tests.hostile_tenant.tally import Finding, Tally
from tests.kit.identity_kit import (
    AUDIENCE,
    ISSUER,
    claims,
    ec_key,
    http_server,
    key_set,
    public_jwk,
    rsa_key,
    token,
    with_body,
)
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer

PREFIX = "/v1/admin/"
_IN_FLIGHT = 8
_TIMEOUT_S = 30.0
_REFUSED = frozenset({401, 403})
_NO_ROUTE = frozenset({404, 405})
_TOKEN_S = 6 * 3_600
_SIMPLE = re.compile(r"[a-z0-9_-]+")
_METHODS = ("GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "OPTIONS")
_NAMES = ("acme", "acme2", DEPLOYMENT, "0123456789abcdef", "work", "requests", "0", "-1", "*", "..", "key_id")
_QUERIES: Sequence[dict[str, str]] = (
    {},
    {"tenant": DEPLOYMENT},
    {"adopt": "true"},
    {"restore": "true"},
    {"cursor": "AAAA"},
    {"limit": "100"},
)
_BODIES = (
    *(b"", b"{}", b"[]", b"null", b"\xff", b'{"weight": 9}', b'{"all": true, "dry_run": false}'),
    b'{"tenant": "_deployment", "name": "x", "role": "admin"}',
    b'{"tenant": "_deployment", "subject": "u-17", "role": "admin"}',
    b'{"tenant": "acme", "name": "x", "grants": ["dead_letters:payload"]}',
    b'{"dry_run": false, "topic": "work", "last_offset": 9}',
)
_STATE = (
    "SELECT key_id, tenant, name, role, scopes, grants, expires_at, revoked_at FROM api_keys ORDER BY key_id",
    "SELECT tenant, subject, role, disabled, grants FROM users ORDER BY tenant, subject",
    "SELECT tenant FROM barred_tenants ORDER BY tenant",
    "SELECT event_id, event, tenant, outcome FROM admin_events ORDER BY event_id",
)


@dataclass(frozen=True, slots=True)
class AdminServer:
    """One that runs.

    Attributes:
        shown: headers by what they show; none of them is an identity of the deployment.
        honest: key of an administrator.
        routes: methods and paths, by its own OpenAPI document.
    """

    url: str
    database: PostgresServer
    shown: Sequence[tuple[str, dict[str, str]]]
    honest: str
    routes: Sequence[tuple[str, str]]

    def state(self) -> list[list[tuple[object, ...]]]:
        """Everything in Postgres that it may change."""
        with connect(self.database.owner_dsn, "hostile-tenant") as owner:
            act_for(owner, ALL_TENANTS)
            return [owner.execute(statement.encode()).fetchall() for statement in _STATE]

    def unusable(self) -> list[str]:
        """The lists that an administrator does not get."""
        headers = {"authorization": f"Bearer {self.honest}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT_S) as client:
            paths = [path for method, path in self.routes if method == "GET" and "{" not in path]
            answers = {path: client.get(path).status_code for path in paths}
        return [f"{path}: {status} for an administrator" for path, status in answers.items() if status != 200]


@contextmanager
def admin_server(cluster: Cluster, database: PostgresServer, folder: Path) -> Iterator[AdminServer]:
    """Of the first pipeline, as its user ``fairlane_admin``. The database has the tables, and nothing in them."""
    document = key_set(public_jwk(rsa_key(), kid="rsa-1"), public_jwk(ec_key(), kid="ec-1"))
    user = PLAIN.user("admin")
    with ExitStack() as stack:
        issuer = stack.enter_context(http_server(lambda handler: with_body(handler, document)))
        ports = PortClaims()
        stack.callback(ports.close)
        port, metrics_port = ports.take("admin"), ports.take("metrics")
        env = {
            **cluster.kafka.user_env(user, cluster.passwords[user]),
            "POSTGRES_DSN": database.admin_dsn,
            "ADMIN_HOST": HOST,
            "ADMIN_PORT": str(port),
            "JWT_ISSUER": ISSUER,
            "JWT_AUDIENCE": AUDIENCE,
            "JWT_JWKS_URL": issuer,
            # What refuses is to be the rights, not a limit.
            **dict.fromkeys(("GATEWAY_FAILED_KEYS_PER_S", "GATEWAY_KEY_RATE_PER_S", "GATEWAY_KEY_BURST"), "1000000"),
            **dict.fromkeys(("GATEWAY_TENANT_RATE_PER_S", "GATEWAY_TENANT_BURST"), "1000000"),
        }
        folder.mkdir(parents=True, exist_ok=True)
        process = ServiceProcess(
            Service("admin-1", ("-m", "producers.admin"), {}), env, metrics_port, folder / "admin.log"
        )
        stack.callback(process.kill)
        process.start().wait_ready()
        url = f"http://{HOST}:{port}"
        paths = httpx.get(f"{url}/openapi.json", timeout=_TIMEOUT_S).json()["paths"]
        routes = [
            (method.upper(), path) for path, methods in paths.items() if path.startswith(PREFIX) for method in methods
        ]
        shown, honest = _credentials(database.owner_dsn)
        yield AdminServer(url, database, shown, honest, routes)


def _credentials(owner_dsn: str) -> tuple[list[tuple[str, dict[str, str]]], str]:
    """All that a tenant, or somebody who knows its keys and can get tokens, could show; and an administrator's key."""
    shown: dict[str, str] = {}
    with ApiKeys(owner_dsn) as keys:
        honest = keys.create(DEPLOYMENT, "an administrator", Role.ADMIN).text
        for tenant in ("acme", "acme2"):
            for role in (Role.VIEWER, Role.TENANT):
                shown[f"key of {tenant}, {role}"] = keys.create(tenant, "its own", role).text
        # From before roles of the deployment existed.
        old = {role: keys.create("acme", f"an old {role}") for role in (Role.OPERATOR, Role.ADMIN)}
        shown |= {f"old key of acme, {role}": one.text for role, one in old.items()}
        revoked = keys.create(DEPLOYMENT, "revoked", Role.ADMIN)
        keys.revoke(revoked.key.key_id)
        keys.set_user("acme", "u-disabled", Role.TENANT, disabled=True)
        of_disabled = keys.create("acme", "of a disabled user", user="u-disabled")
        # A viewer of the deployment, whom claims of a token do not make more; disabled, so that it is nobody.
        keys.set_user(DEPLOYMENT, "u-viewer", Role.VIEWER, disabled=True)
    with connect(owner_dsn, "hostile-tenant") as owner:
        act_for(owner, ALL_TENANTS)
        for role, one in old.items():
            owner.execute("UPDATE api_keys SET role = %s WHERE key_id = %s", (role.value, one.key.key_id))
    shown["revoked key of the deployment"] = revoked.text
    shown["key of a disabled user"] = of_disabled.text
    # Ids of keys are in logs and lists; their secrets are not.
    shown["id of an administrator's key"] = honest[:20] + shown["key of acme, tenant"][20:]
    shown |= _tokens()
    headers = [(what, {"authorization": f"Bearer {text}"}) for what, text in shown.items()]
    headers += [(f"{what}, as x-api-key", {"x-api-key": text}) for what, text in shown.items()]
    headers += [("nothing", {}), ("an empty token", {"authorization": "Bearer"})]
    headers += [
        ("a password", {"authorization": "Basic YWRtaW46YWRtaW4="}),
        ("two keys", {"authorization": f"Bearer {honest[:20]}", "x-api-key": shown["key of acme, tenant"]}),
        ("a cookie", {"cookie": "__Host-fairlane-session=" + "A" * 43}),
    ]
    return headers, honest


def _tokens() -> dict[str, str]:
    exp = now_ms() // 1_000 + _TOKEN_S
    found = {}
    every_role = [role.value for role in Role]
    for tenant in ("acme", DEPLOYMENT, f"{DEPLOYMENT} ", DEPLOYMENT.upper(), "*", ""):
        for role in Role:
            more = {"roles": every_role, "grants": [*map(str, GRANTABLE)], "scope": "admin"}
            found[f"token of {tenant!r}, {role}"] = token(claims(tenant=tenant, role=role.value, exp=exp, **more))
    found["token of a disabled viewer of the deployment"] = token(
        claims(tenant=DEPLOYMENT, sub="u-viewer", role="admin", exp=exp)
    )
    found["token of another signer"] = token(
        claims(tenant=DEPLOYMENT, role="admin", exp=exp), private=rsa_key("another")
    )
    found["token that has expired"] = token(claims(role="admin", exp=exp - 2 * _TOKEN_S))
    found["token without a signature"] = token(claims(role="admin", exp=exp)).rpartition(".")[0] + "."
    return found


async def try_routes(
    server: AdminServer, rng: Random, tries: int, tally: Tally, on_answer: Callable[[int], None] = lambda _: None
) -> None:
    """So many calls. Each must be refused; one that names no route may be told so."""
    slots = asyncio.Semaphore(_IN_FLIGHT)

    async def send(call: _Call) -> None:
        try:
            await _sent(client, call, tally)
        finally:
            slots.release()
        on_answer(1)

    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client, asyncio.TaskGroup() as tasks:
        for _ in range(tries):
            await slots.acquire()
            tasks.create_task(send(_drawn(server, rng, client)))


@dataclass(frozen=True, slots=True)
class _Call:
    """``is_route``: method and path are of a route, so that the call must be refused and nothing else."""

    operation: str
    shown: str
    request: httpx.Request
    is_route: bool


def _drawn(server: AdminServer, rng: Random, client: httpx.AsyncClient) -> _Call:
    method, template = rng.choice(server.routes)
    names = [_name(rng) for _ in range(template.count("{"))]
    path = re.sub(r"\{[a-z_]+\}", "{}", template).format(*(quote(name, safe="") for name in names))
    is_route = all(_SIMPLE.fullmatch(name) for name in names)
    if rng.random() < 0.1:
        method, is_route = rng.choice(_METHODS), False
    if rng.random() < 0.1:
        path, is_route = rng.choice((path + "/", "/" + path, path.upper(), path.replace("/v1", "/v1/.", 1))), False
    shown, headers = rng.choice(server.shown)
    headers = {**headers, "if-match": '"*"', "x-forwarded-for": "127.0.0.1", "content-type": "application/json"}
    request = client.build_request(
        method, server.url + path, headers=headers, params=rng.choice(_QUERIES), content=rng.choice(_BODIES)
    )
    return _Call(f"admin {method} {template.removeprefix(PREFIX)}", shown, request, is_route)


def _name(rng: Random) -> str:
    name = rng.choice(_NAMES)
    return rng.choice([*CHANGES.values()])(rng, name, ("", "staging."))[:60] if rng.random() < 0.3 else name


async def _sent(client: httpx.AsyncClient, call: _Call, tally: Tally) -> None:
    target = Target(call.shown)
    try:
        status = (await client.send(call.request)).status_code
    except httpx.HTTPError as error:
        tally.found(Finding("unanswered", call.operation, target, f"{call.request.url}: {type(error).__name__}"))
        return
    if status in _REFUSED or (status in _NO_ROUTE and not call.is_route):
        tally.refused[call.operation] += 1
    else:
        tally.found(Finding("allowed", call.operation, target, f"{call.request.url}: status {status}"))
