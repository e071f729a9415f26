"""Keys of calls: what is done once, who is told what, and when a key is free again."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceReply
from producers.gateway.idempotency import MOST_KEY_CHARS, Idempotency, KeyClaim, LocalClaims, checked_key
from producers.openai_api.errors import UNCERTAIN, GatewayError
from tests.kit.claim_store_suite import ClaimStoreSuite, OpenStore
from tests.kit.openai_kit import EMBEDDER, KEY, MODEL, OTHER_KEY, Gate, Script, ScriptedSubmitter, build
from tests.kit.waiting import eventually_async

ROUTE, BODY = "/v1/chat/completions", b"{}"
PLANTED = "planted-key"
REPLY = InferenceReply("r-1", "acme", "ok")


class TestLocalClaims(ClaimStoreSuite):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        return lambda: nullcontext(LocalClaims())


class KeptNames(LocalClaims):
    """Knows which names there were."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        self.names.append(name)
        return await super().swap(tenant, name, expected, new)


class World:
    """Replies and the time, as the test says."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.replies: dict[tuple[str, str], InferenceReply] = {}
        self.ids = 0
        self.keys = Idempotency(LocalClaims(), self.find, lambda: self.now_ms)

    async def find(self, tenant: str, request_id: str) -> InferenceReply | None:
        return self.replies.get((tenant, request_id))

    async def begin(
        self, key: str | None = PLANTED, body: bytes = BODY, tenant: str = "acme", route: str = ROUTE
    ) -> Any:
        self.ids += 1
        return await self.keys.begin(tenant, route, key, body, f"r-{self.ids}")

    async def status(self, key: str = PLANTED, body: bytes = BODY) -> tuple[int, str | None]:
        """Of the error that beginning is answered with."""
        with pytest.raises(GatewayError) as raised:
            await self.begin(key, body)
        assert key not in raised.value.message
        return raised.value.status, raised.value.request_id


def test_a_call_goes_its_way() -> None:
    async def run() -> None:
        world = World()
        call = await world.begin()
        assert (call.request_id, call.reply, call.has_key) == ("r-1", None, True)
        assert await world.status() == (409, "r-1")
        await call.confirm()
        assert await world.status() == (409, "r-1")
        assert await world.status(body=b"[]") == (422, None)
        world.replies["acme", "r-1"] = REPLY
        await call.settle(REPLY)
        again = await world.begin()
        assert (again.request_id, again.reply, again.has_key) == ("r-1", REPLY, True)
        assert await world.status(body=b"[]") == (422, None)

    asyncio.run(run())


def test_tenants_routes_and_keys_are_apart() -> None:
    async def run() -> None:
        world = World()
        calls = [
            await world.begin(),
            await world.begin("other"),
            await world.begin(tenant="globex"),
            await world.begin(route="/v1/embeddings"),
            await world.begin(None),
            await world.begin(None),
        ]
        assert len({call.request_id for call in calls}) == 6
        assert [call.has_key for call in calls] == [True] * 4 + [False] * 2

    asyncio.run(run())


@pytest.mark.parametrize("outcome", ["rejected", "expired"])
def test_what_was_not_run_gives_its_key_back(outcome: str) -> None:
    async def run() -> None:
        world = World()
        refused = replace(REPLY, outcome=outcome)
        call = await world.begin()
        await call.confirm()
        await call.settle(refused)
        second = await world.begin()
        assert (second.request_id, second.reply) == ("r-2", None)
        # And so does one whose reply nobody waited for.
        await second.confirm()
        world.replies["acme", "r-2"] = replace(refused, request_id="r-2")
        third = await world.begin()
        assert (third.request_id, third.reply) == ("r-3", None)
        assert await world.status() == (409, "r-3")

    asyncio.run(run())


@pytest.mark.parametrize("outcome", ["ok", "failed", "cancelled"])
def test_what_was_run_keeps_its_key(outcome: str) -> None:
    async def run() -> None:
        world = World()
        reply = replace(REPLY, outcome=outcome)
        world.replies["acme", "r-1"] = reply
        call = await world.begin()
        await call.confirm()
        await call.settle(reply)
        assert (await world.begin()).reply == reply

    asyncio.run(run())


def test_a_claim_that_was_never_confirmed_is_taken_over_with_its_id() -> None:
    async def run() -> None:
        world = World()
        await world.begin()
        world.now_ms += 119_999
        assert await world.status() == (409, "r-1")
        world.now_ms += 1
        heir = await world.begin()
        # Published twice, it is run once.
        assert (heir.request_id, heir.reply) == ("r-1", None)
        assert await world.status() == (409, "r-1")
        await heir.confirm()
        world.now_ms += 1_000_000
        assert await world.status() == (409, "r-1")

    asyncio.run(run())


@pytest.mark.parametrize("outcome", ["rejected", "expired"])
def test_a_refusal_of_what_was_sent_again_frees_nothing(outcome: str) -> None:
    async def run() -> None:
        world = World()
        refused = replace(REPLY, outcome=outcome)
        # The first may be in the log, and run; so whatever refuses the second says nothing of it.
        await (await world.begin()).doubt()
        for _ in range(2):
            again = await world.begin()
            assert (again.request_id, again.reply) == ("r-1", None)
            assert await world.status() == (409, "r-1")
            await again.confirm()
            assert await world.status() == (409, "r-1")
            await again.settle(refused)
        # And where nobody waited for the refusal.
        again = await world.begin()
        await again.confirm()
        world.replies["acme", "r-1"] = refused
        heir = await world.begin()
        assert (heir.request_id, heir.reply) == ("r-1", None)
        assert await world.status() == (409, "r-1"), "one of many sends it again"
        await heir.give_back()
        assert (await world.begin()).request_id == "r-1"
        world.replies["acme", "r-1"] = REPLY
        assert (await world.begin()).reply == REPLY

    asyncio.run(run())


def test_of_many_at_once_one_is_done() -> None:
    async def run() -> None:
        world = World()
        found = await asyncio.gather(*(world.begin() for _ in range(20)), return_exceptions=True)
        assert [one.request_id for one in found if not isinstance(one, BaseException)] == ["r-1"]
        refusals = [one for one in found if isinstance(one, GatewayError)]
        assert [one.status for one in refusals] == [409] * 19

    asyncio.run(run())


@given(st.text())
def test_a_claim_is_read_as_it_was_written_and_nothing_else_is_one(text: str) -> None:
    for claim in (KeyClaim("d", "r-1", 5, confirmed=True), KeyClaim("d", "r-1", 0, is_again=True)):
        assert KeyClaim.unpacked(claim.packed()) == claim
    if "|" not in text:
        assert KeyClaim.unpacked(text) is None


@pytest.mark.parametrize(
    "stored", ["", "d|r-1|5", "d|r-1|\u00b2|0", "d|r-1|\u0665|0", "d|r-1|-5|0", "d|r-1|5|2", "d|r-1|5|1|x"]
)
def test_what_is_like_a_claim_is_none(stored: str) -> None:
    assert KeyClaim.unpacked(stored) is None
    assert KeyClaim.unpacked(f"d|r-1|{'9' * 5_000}|0") is None, "no number of milliseconds is as long"


def test_what_others_wrote_there_is_replaced() -> None:
    async def run() -> None:
        world, store = World(), KeptNames()
        world.keys = Idempotency(store, world.find, lambda: world.now_ms)
        await world.begin()
        store.put("acme", store.names[0], "rubbish")
        assert (await world.begin()).request_id == "r-2"

    asyncio.run(run())


def test_claims_in_memory_are_bounded_and_end() -> None:
    async def run() -> None:
        now_s = 0.0
        store = LocalClaims(ttl_s=10.0, most=2, clock_s=lambda: now_s)
        for name in ("a", "b", "c"):
            await store.swap("acme", name, None, "1")
        assert [store.get(name) for name in ("a", "b", "c")] == [None, "1", "1"]
        now_s = 10.0
        assert store.get("c") is None
        assert await store.swap("acme", "b", None, "2") == "2"

    asyncio.run(run())


def test_no_tenant_pushes_out_the_claims_of_another() -> None:
    async def run() -> None:
        store = LocalClaims(most=10)
        await store.swap("globex", "theirs", None, "1")
        for number in range(100):
            await store.swap("acme", f"mine-{number}", None, "1")
        assert store.get("theirs") == "1"
        assert [store.get(f"mine-{number}") for number in (90, 91)] == [None, "1"]

    asyncio.run(run())


def test_keys() -> None:
    for key in (None, "a", "7f2c-1", "x" * MOST_KEY_CHARS, "with space"):
        assert checked_key(key) == key
    for key in ("", "x" * (MOST_KEY_CHARS + 1), "ä", "a\n"):
        with pytest.raises(GatewayError):
            checked_key(key)


class Caller:
    """Calls of the routes in this event loop."""

    def __init__(self, submitter: ScriptedSubmitter) -> None:
        self.submitter = submitter
        self._app = build(submitter)

    async def post(self, key: str, path: str = ROUTE, token: str = KEY, **fields: Any) -> httpx.Response:
        body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        if path == "/v1/embeddings":
            body = {"model": EMBEDDER, "input": "a"}
        headers = {"authorization": f"Bearer {token}", "idempotency-key": key}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://gateway") as http:
            return await http.post(path, content=json.dumps(body | fields), headers=headers)


def test_a_route_answers_again_what_it_answered() -> None:
    async def run() -> None:
        caller = Caller(ScriptedSubmitter())
        first, again, streamed = [
            await caller.post("k"),
            await caller.post("k"),
            await caller.post("k", stream=True),
        ]
        assert first.status_code == again.status_code == 200
        assert first.content == again.content
        assert first.headers["x-request-id"] == again.headers["x-request-id"]
        assert streamed.status_code == 422
        others = [await caller.post("k", token=OTHER_KEY), await caller.post("k", "/v1/embeddings")]
        assert [one.status_code for one in others] == [200, 200]
        assert len(caller.submitter.submitted) == 3
        assert (await caller.post("k" * 256)).json()["error"]["param"] == "Idempotency-Key"

    asyncio.run(run())


def test_a_call_in_flight_is_named() -> None:
    async def run() -> None:
        caller, gate = Caller(ScriptedSubmitter()), Gate()
        caller.submitter.scripts.append(Script(before_reply=gate))
        first = asyncio.create_task(caller.post("k"))
        await eventually_async(lambda: caller.submitter.submitted)
        second = await caller.post("k")
        request_id = caller.submitter.submitted[0][1].request_id
        assert second.status_code == 409
        assert second.headers["x-request-id"] == request_id
        assert request_id in second.json()["error"]["message"]
        assert "retry-after" in second.headers
        gate.open()
        assert (await first).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "script",
    [
        Script(refused=GatewayError(429, "overloaded", "full", retry_after_ms=5)),
        Script(outcome={"outcome": "rejected", "code": "overloaded", "output": None}),
    ],
)
def test_a_refused_call_may_be_tried_again(script: Script) -> None:
    async def run() -> None:
        for stream in (False, True):
            caller = Caller(ScriptedSubmitter())
            caller.submitter.scripts.append(script)
            answers = [await caller.post("k", stream=stream) for _ in range(2)]
            assert [one.status_code for one in answers] == [429, 200]

    asyncio.run(run())


def test_a_call_that_may_have_been_accepted_can_be_sent_again_under_its_key() -> None:
    async def run() -> None:
        caller = Caller(ScriptedSubmitter())
        caller.submitter.scripts.append(Script(refused=GatewayError(503, UNCERTAIN, "who knows")))
        answers = [await caller.post("k") for _ in range(2)]
        assert [one.status_code for one in answers] == [503, 200]
        assert answers[0].headers["x-should-retry"] == "false"

    asyncio.run(run())
