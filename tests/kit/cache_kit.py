"""What the tests of the caches ask for, and a Redis in a dictionary."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from fairlane.outcomes import Outcome, Task
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    Message,
    Output,
    RequestInput,
    SourceCoordinate,
    WorkItem,
)
from fairlane_server.caching.entries import CacheKey
from fairlane_server.caching.responses import CachedAnswer, decode_answer
from fairlane_server.redis.cache import RedisCache
from fairlane_server.retrieval.store import Collection, Hit
from stream_processors.dispatcher.response_cache.caches import PassageCache
from stream_processors.dispatcher.response_cache.lookup import SemanticCache

MODEL_VERSION = "3"
COLLECTION = Collection("acme", "manuals", "static", 4, version=7)
HITS = (Hit("manuals/a#0", "a", "Wiring", "Red goes left.", 5, 0.9), Hit("manuals/b#2", "b", "", "Blue", 1, 0.5))


class DictRedis:
    """The commands that the caches use. ``stored`` is what is there; ``error`` is raised by every call while set."""

    def __init__(self) -> None:
        self.stored: dict[str, object] = {}
        self.lives_ms: dict[str, int] = {}
        self.error: Exception | None = None
        self.before: Callable[[], Awaitable[object]] | None = None
        self.calls = 0

    async def _called(self) -> None:
        self.calls += 1
        if self.before is not None:
            await self.before()
        if self.error is not None:
            raise self.error

    async def getrange(self, name: str, start: int, end: int) -> bytes:
        await self._called()
        value = self.stored.get(name, b"")
        if not isinstance(value, bytes):
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value[start : end + 1]

    async def set(self, name: str, value: bytes, px: int) -> bool:
        await self._called()
        self.stored[name], self.lives_ms[name] = value, px
        return True

    async def delete(self, *names: str) -> int:
        await self._called()
        return sum(self.stored.pop(name, None) is not None for name in names)

    def register_script(self, script: str) -> Any:
        async def rows(keys: list[str], args: list[Any]) -> bytes:
            await self._called()
            found = self.stored.get(keys[0], [])
            if not isinstance(found, list):
                raise ResponseError("ERR Error running script: WRONGTYPE Operation against a key")
            sent = [row if len(row) <= args[1] else b"" for row in found[: args[0]]]
            return b"".join(len(row).to_bytes(4, "big") + row for row in sent)

        async def add(keys: list[str], args: list[Any]) -> int:
            await self._called()
            found = self.stored.setdefault(keys[0], [])
            assert isinstance(found, list)
            found.insert(0, args[0])
            del found[args[1] :]
            self.lives_ms[keys[0]] = args[2]
            return 1

        async def set_all(keys: list[str], args: list[Any]) -> int:
            await self._called()
            for name, value, px in zip(keys, args[::2], args[1::2], strict=True):
                self.stored[name], self.lives_ms[name] = value, px
            return len(keys)

        return add if "LPUSH" in script else set_all if "'SET'" in script else rows


def request(text: str = "Which wire goes left?", **changed: Any) -> InferenceRequest:
    """A request to generate, whose answer can be told again."""
    given = RequestInput(messages=(Message("system", "Be brief."), Message("user", text)))
    fields: dict[str, Any] = {"request_id": "id-1", "model": "smol", "task": Task.GENERATE, "input": given}
    return InferenceRequest(**(fields | changed))


def work(of: InferenceRequest, tenant: str = "acme", **changed: Any) -> WorkItem:
    """The request, as it was dispatched."""
    fields: dict[str, Any] = {
        "request": of,
        "tenant": tenant,
        "pool": "cpu",
        "model_version": MODEL_VERSION,
        "priority_class": "normal",
        "cost_tokens": 10,
        "submitted_at_ms": 1,
        "admitted_at_ms": 2,
        "dispatched_at_ms": 3,
        "deadline_at_ms": 10_000,
        "reply_topic": f"replies.{tenant}",
        "dispatcher_id": "d-1",
        "source": SourceCoordinate(f"requests.{tenant}", 0, 1),
    }
    return WorkItem(**(fields | changed))


def reply(to: WorkItem, text: str = "The red one.", **changed: Any) -> InferenceReply:
    """The answer to it."""
    fields: dict[str, Any] = {
        "request_id": to.request.request_id,
        "tenant": to.tenant,
        "outcome": Outcome.OK,
        "model": to.request.model,
        "model_version": to.model_version,
        "task": to.request.task,
        "output": Output(text=text),
    }
    return InferenceReply(**(fields | changed))


@dataclass
class Caches:
    """All caches over one Redis, or without one."""

    redis: RedisCache
    passages: PassageCache
    semantic: SemanticCache

    async def answer(self, key: CacheKey) -> CachedAnswer | None:
        return await self.redis.get(key, decode_answer)


def caches_over(redis: RedisCache, *, threshold: float = 0.9, now_ms: int = 0) -> Caches:
    return Caches(redis, PassageCache(redis, lambda: now_ms, 300), SemanticCache(redis, threshold))
