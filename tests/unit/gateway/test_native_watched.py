"""Who may listen no longer, and when: a key is revoked, a token ends, a gateway goes."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.requests import HTTPConnection
from websockets.exceptions import ConnectionClosed

from fairlane.outcomes import Decision
from producers.gateway.identity.identity import Identity, Role
from producers.gateway.native.deps import EventPolicy
from producers.gateway.native.events import Event, EventName, watched
from producers.openai_api.errors import GatewayError
from tests.kit.native_kit import Bench, authenticate, decided, recorded, served
from tests.kit.native_socket import following, said, socket
from tests.kit.waiting import PATIENCE_S, eventually

STATUS = Event(EventName.STATUS)


class Checks:
    """What the identity of a caller is said to be, when it is asked for again."""

    def __init__(self) -> None:
        self.answer: GatewayError | Identity | None = None
        self.asked = 0

    async def identify(self, connection: HTTPConnection) -> Identity:
        self.asked += 1
        if isinstance(self.answer, GatewayError):
            raise self.answer
        return self.answer or await authenticate(connection)


@pytest.mark.parametrize(
    "answer",
    [
        GatewayError(401, "unauthenticated", "the key was revoked"),
        GatewayError(403, "forbidden", "the key has expired"),
        Identity("globex", "key-1", Role.TENANT),
    ],
    ids=["revoked", "expired", "moved"],
)
def test_who_may_listen_no_longer_is_told_nothing_more(answer: GatewayError | Identity) -> None:
    checks = Checks()
    bench = Bench(identify=checks.identify, events=EventPolicy(check_s=0.02))
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with served(bench) as url, following(url) as events, socket(url) as websocket:
        assert next(events)[0] == said(websocket)[0] == "status"
        # It goes on while it is known.
        seen = checks.asked
        eventually(lambda: checks.asked > seen + 4, what="looks at the callers")
        assert bench.deps.slots.total == 2
        checks.answer = answer
        assert list(events) == []
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(PATIENCE_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1008
        eventually(lambda: bench.deps.slots.total == 0, what="the end of the streams")


@pytest.mark.parametrize("status", [429, 503])
def test_what_says_nothing_of_the_caller_ends_no_stream(status: int) -> None:
    checks = Checks()
    checks.answer = GatewayError(status, "unavailable", "ask again")
    bench = Bench(identify=checks.identify, events=EventPolicy(check_s=0.02))
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with served(bench) as url, following(url) as events:
        assert next(events)[0] == "status"
        eventually(lambda: checks.asked > 4, what="looks at the caller")
        bench.results.remember([recorded(1, request_id=bench.store.decisions[0].request_id).reply])
        assert next(events)[0] == "result"


def test_what_is_there_is_told_before_the_end() -> None:
    async def ready() -> AsyncGenerator[Event, None]:
        yield STATUS
        await asyncio.sleep(PATIENCE_S)

    async def check() -> None:
        raise AssertionError("it is not time yet")

    async def test() -> None:
        ending = asyncio.Event()
        events = ready()
        told = watched(events, ending, check, PATIENCE_S)
        assert await anext(told) is STATUS
        coming = asyncio.ensure_future(anext(told))
        await asyncio.sleep(0)
        ending.set()
        assert (await coming).name is EventName.TIMEOUT
        assert [event async for event in told] == []
        # Nothing is left that would still be asked.
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await events.aclose()

    asyncio.run(test())
