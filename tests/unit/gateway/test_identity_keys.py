"""API keys: who is let in, who is not, and what can be learnt from being refused."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.api_keys.api_key import Role, Scope, looks_like_key, new_key, parse_key
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.store_error import StoreError
from producers.gateway.identity.api_keys import KeyVerifier, StoredKey
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError, answer
from producers.gateway.identity.lookups import (
    FRESH_MS,
    FULL_GRACE_MS,
    MOST_STRANGERS_OF_ORIGIN,
    MOST_UNDER_WAY,
    MOST_UNKNOWN_IN_FLIGHT,
    Lookups,
)
from producers.gateway.limits.rate_buckets import RatePolicy
from tests.kit.identity_kit import Clock, MemoryIdentityStore
from tests.kit.waiting import eventually_async

T = TypeVar("T")
GRACE_MS = 300_000
FAILURES = RatePolicy(1.0, 10)


class Bench:
    """A verifier of keys, its store, and its time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = MemoryIdentityStore()
        self.verifier = KeyVerifier(self.store, GRACE_MS, self.clock, self.clock, CircuitBreaker(), 1.0)

    async def refusal(self, text: str) -> AuthRefusal:
        with pytest.raises(RefusedError) as caught:
            await self.verifier.verify(text)
        return caught.value.why


def run(use: Callable[[Bench], Awaitable[T]]) -> T:
    async def within_a_loop() -> T:
        return await use(Bench())

    return asyncio.run(within_a_loop())


def test_a_key_is_its_tenants_with_its_role_and_scopes() -> None:
    async def use(bench: Bench) -> None:
        made = bench.store.create("acme", Role.VIEWER, (Scope.RESULTS,), user="u-17")
        found = await bench.verifier.verify(made.text)
        assert found == Identity("acme", made.key_id, Role.VIEWER, frozenset({Scope.RESULTS}), "u-17")

    run(use)


def test_two_keys_are_never_alike_and_show_nothing_of_themselves() -> None:
    made = [new_key() for _ in range(100)]
    assert len({key.key_id for key in made}) == len({key.text[-43:] for key in made}) == 100
    for key in made:
        assert looks_like_key(key.text)
        assert key.text[-43:] not in repr(key)
        assert repr(key.secret_sha256) not in repr(key)


def test_whoever_has_not_the_whole_key_is_refused() -> None:
    async def use(bench: Bench) -> None:
        key, other = bench.store.create("acme").text, bench.store.create("globex").text
        head, secret = key[:20], key[20:]
        stranger = new_key().text
        wrong = {
            "the secret of another tenant's key": head + other[20:],
            "a guessed secret": head + stranger[20:],
            "a guessed id": stranger[:20] + secret,
            "a key that never was": stranger,
            "its last character": key[:-1] + ("A" if key[-1] != "A" else "E"),
        }
        for what, text in wrong.items():
            assert await bench.refusal(text) is AuthRefusal.WRONG_KEY, what
        no_keys = [key[:-1], key + "A", head, key.upper(), key + "\n", " " + key, "fl_", key.replace("_", "-"), ""]
        for text in [*no_keys, key[:-1] + "\u00e9", "fl_" + "0" * 16 + "_" + "'; DROP TABLE users; --" + "x" * 20]:
            assert await bench.refusal(text) is AuthRefusal.MALFORMED, text
        assert (await bench.verifier.verify(key)).tenant == "acme"

    run(use)


def test_tables_of_before_which_find_a_key_by_its_id_alone_let_nobody_in_with_another_secret() -> None:
    class ById(MemoryIdentityStore):
        async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
            return self._keys.get(key_id)

    async def use(bench: Bench) -> None:
        bench.store = ById()
        bench.verifier = KeyVerifier(bench.store, GRACE_MS, bench.clock, bench.clock, CircuitBreaker(), 1.0)
        key = bench.store.create("acme").text
        assert await bench.refusal(key[:20] + new_key().text[20:]) is AuthRefusal.WRONG_KEY
        assert (await bench.verifier.verify(key)).tenant == "acme"

    run(use)


@given(st.text(max_size=80))
def test_any_text_is_a_key_or_none(text: str) -> None:
    shown = parse_key(text)
    assert shown is None or len(shown.secret_sha256) == 32


def test_nothing_tells_whether_there_is_a_key_with_this_id() -> None:
    """Neither what is said nor whether the store is asked, whatever is remembered of the key."""

    async def use(bench: Bench) -> None:
        real, revoked, never = bench.store.create("acme"), bench.store.create("acme"), new_key()
        bench.store.revoke(revoked.key_id)
        wrong_secret = new_key().text[20:]
        await bench.verifier.verify(real.text)
        said = set()
        for key_id in (real.key_id, never.key_id, revoked.key_id):
            for _ in range(2):
                before = bench.store.asked
                why = await bench.refusal(f"fl_{key_id}_{wrong_secret}")
                assert bench.store.asked == before + 1, "a guess is never answered from memory"
                refused = answer(why)
                said.add((refused.status, refused.code, refused.message, refused.retry_after_ms))
        assert len(said) == 1
        bench.store.is_away = True
        for key_id in (real.key_id, never.key_id):
            assert await bench.refusal(f"fl_{key_id}_{wrong_secret}") is AuthRefusal.UNAVAILABLE

    run(use)


def test_every_401_for_a_wrong_proof_reads_the_same() -> None:
    # A session is shown by a browser, which must be told to log in: it has one answer of its own.
    others = (AuthRefusal.MISSING, AuthRefusal.NO_SESSION)
    nobody = [answer(why) for why in AuthRefusal if answer(why).status == 401 and why not in others]
    assert len(nobody) > 3
    assert len({(error.code, error.message) for error in nobody}) == 1
    assert answer(AuthRefusal.KEY_REVOKED).status == 401
    assert {
        answer(why).status for why in (AuthRefusal.KEY_EXPIRED, AuthRefusal.USER_DISABLED, AuthRefusal.NO_SCOPE)
    } == {403}


def test_a_revoked_key_is_refused_within_a_second() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme")
        await bench.verifier.verify(key.text)
        bench.store.revoke(key.key_id)
        bench.clock.now_ms += FRESH_MS
        assert FRESH_MS <= 1_000
        assert await bench.refusal(key.text) is AuthRefusal.KEY_REVOKED

    run(use)


def test_a_key_that_is_used_all_the_time_is_asked_for_once_a_second() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme").text
        for _ in range(1_000):
            await bench.verifier.verify(key)
            bench.clock.now_ms += 10
        assert bench.store.asked == 10

    run(use)


def test_a_key_that_ran_out_is_refused_although_it_is_remembered() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme", expires_at_ms=bench.clock.now_ms + 10).text
        await bench.verifier.verify(key)
        bench.clock.now_ms += 10
        assert await bench.refusal(key) is AuthRefusal.KEY_EXPIRED

    run(use)


def test_a_key_of_a_user_who_is_disabled_is_refused() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme", user="u-17").text
        bench.store.set_user("globex", "u-17", Role.TENANT, disabled=True)
        await bench.verifier.verify(key)
        bench.store.set_user("acme", "u-17", Role.TENANT, disabled=True)
        bench.clock.now_ms += FRESH_MS
        assert await bench.refusal(key) is AuthRefusal.USER_DISABLED

    run(use)


# --- while the store is away


def test_while_the_store_is_away_keys_that_it_vouched_for_pass_for_a_while() -> None:
    async def use(bench: Bench) -> None:
        known, revoked, unknown = (bench.store.create("acme") for _ in range(3))
        await bench.verifier.verify(known.text)
        bench.store.revoke(revoked.key_id)
        assert await bench.refusal(revoked.text) is AuthRefusal.KEY_REVOKED
        bench.store.is_away = True
        bench.clock.now_ms += GRACE_MS - 1
        assert (await bench.verifier.verify(known.text)).subject == known.key_id
        assert await bench.refusal(revoked.text) is AuthRefusal.KEY_REVOKED
        assert await bench.refusal(unknown.text) is AuthRefusal.UNAVAILABLE
        assert answer(AuthRefusal.UNAVAILABLE).status == 503
        bench.clock.now_ms += 1
        assert await bench.refusal(known.text) is AuthRefusal.UNAVAILABLE
        bench.store.is_away = False
        bench.clock.now_ms += 60_000
        for key in (known, unknown):
            await bench.verifier.verify(key.text)

    run(use)


def test_a_store_that_does_not_answer_is_left_alone() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme").text
        await bench.verifier.verify(key)
        bench.store.is_away = True
        bench.clock.now_ms += FRESH_MS
        before = bench.store.asked
        for _ in range(100):
            await bench.verifier.verify(key)
        assert bench.store.asked - before < 10

    run(use)


def test_a_key_that_is_gone_when_the_store_is_back_has_no_grace_left() -> None:
    async def use(bench: Bench) -> None:
        key = bench.store.create("acme")
        await bench.verifier.verify(key.text)
        bench.store.delete(key.key_id)
        bench.clock.now_ms += FRESH_MS
        assert await bench.refusal(key.text) is AuthRefusal.WRONG_KEY
        bench.store.is_away = True
        assert await bench.refusal(key.text) is AuthRefusal.UNAVAILABLE

    run(use)


# --- many at a time


class SlowStore(MemoryIdentityStore):
    """Answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        found = await super().key(key_id, shown_sha256, timeout_s)
        await self.go_on.wait()
        return found


def test_who_comes_together_asks_once_and_a_caller_that_leaves_disturbs_nobody() -> None:
    async def run_it() -> None:
        store, clock = SlowStore(), Clock()
        verifier = KeyVerifier(store, GRACE_MS, clock, clock, CircuitBreaker(), 1.0)
        key = store.create("acme").text
        callers = [asyncio.create_task(verifier.verify(key)) for _ in range(20)]
        await asyncio.sleep(0)
        callers[0].cancel()
        await asyncio.sleep(0)
        store.go_on.set()
        found = await asyncio.gather(*callers, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert all(isinstance(one, Identity) for one in found[1:])
        assert store.asked == 1
        await verifier.close()

    asyncio.run(run_it())


def test_guesses_are_bounded_and_do_not_keep_out_who_is_known() -> None:
    async def run_it() -> None:
        store, clock = SlowStore(), Clock()
        verifier = KeyVerifier(store, GRACE_MS, clock, clock, CircuitBreaker(), 1.0)
        key = store.create("acme").text
        store.go_on.set()
        await verifier.verify(key)
        store.go_on.clear()
        before = store.asked
        guesses = [asyncio.create_task(verifier.verify(new_key().text)) for _ in range(3 * MOST_UNKNOWN_IN_FLIGHT)]
        await eventually_async(lambda: store.asked - before == MOST_UNKNOWN_IN_FLIGHT)
        clock.now_ms += FRESH_MS
        assert (await verifier.verify(key)).tenant == "acme"
        assert store.asked - before == MOST_UNKNOWN_IN_FLIGHT + 1, "who is known has a place"
        store.go_on.set()
        refused = await asyncio.gather(*guesses, return_exceptions=True)
        reasons = [error.why for error in refused if isinstance(error, RefusedError)]
        assert reasons.count(AuthRefusal.WRONG_KEY) == MOST_UNKNOWN_IN_FLIGHT
        assert reasons.count(AuthRefusal.UNAVAILABLE) == 2 * MOST_UNKNOWN_IN_FLIGHT
        await verifier.close()

    asyncio.run(run_it())


def test_a_revoked_key_does_not_pass_for_longer_because_many_are_looked_up() -> None:
    async def run_it() -> None:
        store, clock = SlowStore(), Clock()
        verifier = KeyVerifier(store, GRACE_MS, clock, clock, CircuitBreaker(), 1.0)
        keys = [store.create("acme") for _ in range(MOST_UNDER_WAY + 1)]
        store.go_on.set()
        for key in keys:
            await verifier.verify(key.text)
        store.go_on.clear()
        revoked = keys.pop()
        store.revoke(revoked.key_id)
        clock.now_ms += FRESH_MS
        before = store.asked
        others = [asyncio.create_task(verifier.verify(key.text)) for key in keys]
        await eventually_async(lambda: store.asked - before == MOST_UNDER_WAY)
        # No place is free: that is known to be but a moment.
        assert (await verifier.verify(revoked.text)).tenant == "acme"
        clock.now_ms += FULL_GRACE_MS - FRESH_MS
        assert FULL_GRACE_MS <= 10_000 < GRACE_MS
        with pytest.raises(RefusedError) as raised:
            await verifier.verify(revoked.text)
        assert raised.value.why is AuthRefusal.UNAVAILABLE
        store.go_on.set()
        await asyncio.gather(*others)
        await eventually_async(lambda: not verifier._lookups._talks, what="the end of the look-ups")
        with pytest.raises(RefusedError) as raised:
            await verifier.verify(revoked.text)
        assert raised.value.why is AuthRefusal.KEY_REVOKED
        await verifier.close()

    asyncio.run(run_it())


def test_who_has_an_older_answer_does_not_wait_for_a_slow_store() -> None:
    async def run_it() -> None:
        store, clock = SlowStore(), Clock()
        verifier = KeyVerifier(store, GRACE_MS, clock, clock, CircuitBreaker(), 1.0)
        key, stranger = store.create("acme"), store.create("acme")
        store.go_on.set()
        await verifier.verify(key.text)
        store.go_on.clear()
        clock.now_ms += FRESH_MS
        # Nothing but the caller's timeout ends this: the store does not answer.
        assert (await verifier.verify(key.text)).tenant == "acme"
        waiting = asyncio.create_task(verifier.verify(stranger.text))
        await eventually_async(lambda: store.asked == 3)
        store.revoke(key.key_id)
        store.go_on.set()
        assert (await waiting).subject == stranger.key_id
        clock.now_ms += FRESH_MS
        with pytest.raises(RefusedError, match="key_revoked"):
            await verifier.verify(key.text)
        await verifier.close()

    asyncio.run(run_it())


def test_a_failure_of_ours_is_nobodys_key() -> None:
    """An error that is no word of the store's reaches who waits, and the next one asks again."""

    async def run_it() -> None:
        lookups: Lookups[int] = Lookups(GRACE_MS, Clock(), CircuitBreaker())

        async def breaks() -> int | None:
            raise ZeroDivisionError

        async def works() -> int | None:
            return 7

        async def is_away() -> int | None:
            raise StoreError("away")

        with pytest.raises(ZeroDivisionError):
            await lookups.find("a", breaks)
        with pytest.raises(StoreError):
            await lookups.find("a", is_away)
        assert await lookups.find("a", works) == 7
        await lookups.close()

    asyncio.run(run_it())


def test_an_address_may_show_so_many_keys_in_vain_and_stops_no_other() -> None:
    async def use(bench: Bench) -> None:
        used, unused = bench.store.create("acme").text, bench.store.create("acme").text
        await bench.verifier.verify(used, "10.0.0.1")
        # Longer ago than anything that was found counts.
        bench.clock.now_ms += 10 * GRACE_MS
        for _ in range(FAILURES.burst):
            with pytest.raises(RefusedError) as caught:
                await bench.verifier.verify(new_key().text, "10.0.0.1")
            assert caught.value.why is AuthRefusal.WRONG_KEY
        asked = bench.store.asked
        for text in (new_key().text, unused):
            with pytest.raises(RefusedError) as caught:
                await bench.verifier.verify(text, "10.0.0.1")
            assert caught.value.why is AuthRefusal.TOO_MANY_FAILURES, "whether or not there is such a key"
        assert bench.store.asked == asked, "nothing is looked up"
        assert (await bench.verifier.verify(used, "10.0.0.1")).tenant == "acme"
        assert (await bench.verifier.verify(unused, "10.0.0.2")).tenant == "acme"
        bench.clock.now_ms += 1_001
        assert (await bench.verifier.verify(bench.store.create("acme").text, "10.0.0.1")).tenant == "acme"

    run(use)


def test_strangers_of_one_origin_take_some_of_the_places() -> None:
    async def use() -> None:
        clock = Clock()
        lookups: Lookups[str] = Lookups(GRACE_MS, clock, CircuitBreaker())
        answers: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def ask() -> str | None:
            return await answers

        flood = [asyncio.create_task(lookups.find(("a", n), ask, "a")) for n in range(MOST_STRANGERS_OF_ORIGIN)]
        await asyncio.sleep(0)
        with pytest.raises(StoreError):
            await lookups.find("one more", ask, "a")
        other = asyncio.create_task(lookups.find("one of another", ask, "b"))
        await asyncio.sleep(0)
        answers.set_result("found")
        assert await other == "found"
        assert await asyncio.gather(*flood) == ["found"] * MOST_STRANGERS_OF_ORIGIN
        await asyncio.sleep(0)
        assert not lookups._strangers
        assert await lookups.find("one more", ask, "a") == "found"

    asyncio.run(use())
