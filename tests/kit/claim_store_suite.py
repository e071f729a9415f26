"""What every store of claims does. A test class takes it over and says in the fixture ``store`` which one."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from producers.gateway.idempotency import LocalClaims, RedisClaims

OpenStore = Callable[[], AbstractAsyncContextManager[LocalClaims | RedisClaims]]


class ClaimStoreSuite:
    """Needs the fixture ``open_store``: opens one within an event loop. Names must be ``unique``."""

    def test_a_claim_stands_until_it_is_taken_back(self, open_store: OpenStore, unique: str) -> None:
        async def run() -> None:
            async with open_store() as store:
                assert await store.swap("acme", unique, None, "first") == "first"
                assert await store.swap("acme", unique, None, "second") == "first"
                assert await store.swap("acme", unique, "second", "third") == "first"
                assert await store.swap("acme", unique, "first", "second") == "second"
                assert await store.swap("acme", unique, "first", None) == "second"
                assert await store.swap("acme", unique, "second", None) is None
                assert await store.swap("acme", unique, None, "again") == "again"

        asyncio.run(run())

    def test_one_of_many_gets_it(self, open_store: OpenStore, unique: str) -> None:
        async def run() -> None:
            async with open_store() as store:
                names = [f"claim-{number}" for number in range(20)]
                answers = await asyncio.gather(*(store.swap("acme", unique, None, name) for name in names))
                assert len(set(answers)) == 1
                assert answers[0] in names

        asyncio.run(run())

    def test_what_is_not_there_is_not_replaced(self, open_store: OpenStore, unique: str) -> None:
        async def run() -> None:
            async with open_store() as store:
                assert await store.swap("acme", unique, "nobody's", None) is None
                assert await store.swap("acme", f"{unique}-other", None, "mine") == "mine"
                assert await store.swap("acme", unique, None, "mine") == "mine"

        asyncio.run(run())
