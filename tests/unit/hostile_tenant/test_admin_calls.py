"""Calls of the admin API that are drawn for the hostile tenant's tries."""

import asyncio
import re
from dataclasses import replace
from random import Random
from typing import Any

import httpx

from tests.hostile_tenant.admin_routes import AdminServer, _drawn, try_routes
from tests.hostile_tenant.tally import Tally
from tests.kit.identity_kit import http_server, with_body

NOBODY: Any = None
ROUTES = [
    *(("GET", "/v1/admin/tenants"), ("PUT", "/v1/admin/tenants/{tenant}")),
    *(("POST", "/v1/admin/keys/{key_id}/rotate"), ("GET", "/v1/admin/dead-letters/{topic}/{partition}/{offset}")),
]
SHOWN = [(f"key {number}", {"authorization": f"Bearer {number}"}) for number in range(5)]
SERVER = AdminServer("http://127.0.0.1:8081", NOBODY, SHOWN, "", ROUTES)


def test_every_route_is_called_with_everything_that_is_shown_and_by_other_names() -> None:
    rng, client = Random(1), httpx.AsyncClient()
    calls = [_drawn(SERVER, rng, client) for _ in range(5_000)]
    for call in calls:
        assert (call.request.url.host, call.request.url.port) == ("127.0.0.1", 8081)
        if call.is_route:
            declared = [(method, re.sub(r"\{[a-z_]+\}", "[A-Za-z0-9_-]+", path)) for method, path in ROUTES]
            assert any(
                call.request.method == method and re.fullmatch(pattern, call.request.url.path)
                for method, pattern in declared
            ), call.request.url
    called = {(call.operation, call.shown) for call in calls if call.is_route}
    assert len(called) == len(ROUTES) * len(SHOWN)
    assert len({str(call.request.url) for call in calls}) > 1_000
    assert 0.5 < sum(call.is_route for call in calls) / len(calls) < 0.9


def test_a_call_is_judged_by_its_status() -> None:
    def counted(status: int) -> Tally:
        tally = Tally()
        with http_server(lambda handler: with_body(handler, b"", status)) as url:
            server = replace(SERVER, url=url.removesuffix("/jwks.json"), routes=[("GET", "/v1/admin/tenants")])
            asyncio.run(try_routes(server, Random(2), 40, tally))
        return tally

    # The double knows GET alone: it answers 501 to other methods, which no call of a route has.
    forbidden, open_to_all, missing = counted(403), counted(200), counted(404)
    assert forbidden.kinds.total() + forbidden.refused.total() == 40
    assert forbidden.refused.total() > 30
    assert open_to_all.kinds["allowed"] == 40
    # Of a route, it would be wrong to say that there is none.
    assert missing.kinds["allowed"] > 20
    assert missing.refused.total() > 0
