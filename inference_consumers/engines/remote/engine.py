"""A model that other servers run: each item is a request to one of its endpoints.

A continuous engine: items run as many at a time as the endpoints take, and the others wait here. Endpoints that are
away come back; only an error of this code ends the engine.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fairlane.outcomes import Task
from fairlane.records import TokenUsage
from inference_consumers.engines.continuous import EngineDeath, LoopThread, WaitedRun
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineItem,
    EngineSpec,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    try_once,
    wrong_task,
)
from inference_consumers.engines.remote.connection import EndpointConnection
from inference_consumers.engines.remote.endpoints import ModelEndpoints
from inference_consumers.engines.remote.errors import EndpointKeyError
from inference_consumers.engines.remote.pool import EndpointPool
from inference_consumers.engines.remote.wire import RemoteRequest, ServerWire

_TICK_S = 0.2
_TRIAL_S = 120.0
"""For an item that is tried after loading: a server that is busy for so long is of no use."""
_FLUSH_S = 0.005
"""Texts of so long are passed on together."""

WireOf = Callable[[EngineSpec, ModelEndpoints], ServerWire]


@dataclass(eq=False, slots=True)
class _RemoteItem:
    """One item without an outcome."""

    index: int
    item: EngineItem
    request: RemoteRequest
    observer: RunObserver
    on_text: Callable[[RunObserver], None]
    has_begun: bool = False
    has_text: bool = False
    is_cancelled: bool = False
    task: "asyncio.Task[None] | None" = None

    async def ask(self, connection: EndpointConnection, began: Callable[[], None]) -> ItemOutcome:
        return await self.request.ask(connection, began, self._emit)

    def cancel(self) -> None:
        # A task that is cancelled before its first step never runs, and its item would have no outcome.
        if not self.is_cancelled and self.has_begun and self.task is not None:
            self.task.cancel()
        self.is_cancelled = True

    def _emit(self, text: str) -> None:
        if self.item.parameters.stream:
            self.has_text = True
            self.observer.text(self.index, text)
            self.on_text(self.observer)


class RemoteEngine:
    """The endpoints of a version behind one of the interfaces."""

    def __init__(self, spec: EngineSpec, wire_of: WireOf) -> None:
        """Raises EngineLoadError for a version without endpoints, or with a task that the interface does not have."""
        if spec.endpoints is None:
            raise spec.error(f"version {spec.model.version} has no endpoints in ENDPOINTS_FILE")
        self._entry = spec.endpoints
        self._wire = wire_of(spec, spec.endpoints)
        self.name = self._wire.name
        self.limits = spec.limits
        self._spec = spec
        self._tasks = frozenset(map(Task, spec.model.tasks))
        if others := sorted(self._tasks - self._wire.tasks):
            raise spec.error(f"{self.name} does not do {', '.join(others)}")
        self._thread: LoopThread | None = None
        self._death = EngineDeath()
        # What follows belongs to the loop's thread.
        self._pool: EndpointPool | None = None
        self._runs: dict[RunObserver, set[_RemoteItem]] = {}
        """Batches that joined: their items without an outcome."""
        self._unflushed: set[RunObserver] = set()
        self._helpers: tuple[asyncio.Task[None], ...] = ()

    def load(self) -> None:
        """Check the endpoints, and try one item of each task. Raises EngineLoadError when none serves the model."""
        self._wire.load()
        thread = LoopThread("endpoints")
        try:
            wrong = thread.result_of(self._open())
        except EndpointKeyError as error:
            thread.close()
            raise self._spec.error(str(error)) from error
        self._thread = thread
        if len(wrong) == len(self._entry.endpoints):
            self.close()
            raise self._spec.error(f"no endpoint serves it: {'; '.join(wrong)}")
        trials = [replace(item, time_left_s=_TRIAL_S) for item in self._wire.trials()]
        try_once(self, trials, self._spec)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item; other batches may run meanwhile."""
        waited = WaitedRun(observer, len(batch))
        self.join(batch, waited)
        return waited.wait(self._death.check_alive)

    def join(self, batch: Sequence[EngineItem], observer: RunObserver) -> None:
        """Start on the items at once. The observer is called from one thread, never this one."""
        thread = self._checked()
        prepared = [self._wire.prepare(one) if one.task in self._tasks else wrong_task(one) for one in batch]
        thread.post(partial(self._death.guard, partial(self._begin, batch, prepared, observer)))

    def cancel(self, item_ids: Collection[str]) -> None:
        """Close the connections of these items; they get their outcomes."""
        if self._thread is not None:
            self._thread.post(partial(self._death.guard, partial(self._stop, frozenset(item_ids))))

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        self._death.watch(on_death)

    def metrics(self) -> str:
        return self._checked().result_of(self._metrics())

    def close(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            thread.result_of(self._close())
            thread.close()

    def _checked(self) -> LoopThread:
        self._death.check_alive()
        if self._thread is None:
            raise self._spec.error("not loaded")
        return self._thread

    # In the loop's thread.

    async def _open(self) -> list[str]:
        self._pool = EndpointPool(self._entry, self._wire.check)
        wrong = await self._pool.check_all()
        works = (self._pool.keep_checking(), self._keep_ticking(self._pool))
        self._helpers = tuple(asyncio.create_task(self._death.guarded(work)) for work in works)
        return wrong

    async def _keep_ticking(self, pool: EndpointPool) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            pool.tick()
            for observer, running in tuple(self._runs.items()):
                for item in tuple(running):
                    if observer.is_cancelled(item.index):
                        item.cancel()
                self._report_step(observer)

    def _begin(
        self, batch: Sequence[EngineItem], prepared: Sequence[RemoteRequest | Failure], observer: RunObserver
    ) -> None:
        running = self._runs[observer] = set()
        for index, (item, request) in enumerate(zip(batch, prepared, strict=True)):
            if isinstance(request, Failure):
                observer.finished(index, request)
            elif observer.is_cancelled(index):
                observer.finished(index, CancelledItem(TokenUsage()))
            else:
                running.add(_RemoteItem(index, item, request, observer, self._flush_soon))
        for remote in sorted(running, key=lambda remote: remote.index):
            remote.task = asyncio.get_running_loop().create_task(self._death.guarded(self._answer(remote)))
        self._report_step(observer)

    async def _answer(self, remote: _RemoteItem) -> None:
        assert self._pool is not None  # noqa: S101 - items come after loading
        remote.has_begun = True
        try:
            time_left_s = math.inf if remote.item.time_left_s is None else remote.item.time_left_s
            cancelled = CancelledItem(TokenUsage())
            outcome = cancelled if remote.is_cancelled else await self._pool.outcome_of(remote, time_left_s)
        except asyncio.CancelledError:
            if not remote.is_cancelled:
                # The engine is being closed: what has no outcome by now gets none.
                raise
            outcome = CancelledItem(remote.request.spent)
        self._runs[remote.observer].discard(remote)
        remote.observer.finished(remote.index, outcome)
        if self._runs[remote.observer]:
            self._flush_soon(remote.observer)
        else:
            self._report_step(remote.observer)

    def _stop(self, item_ids: Collection[str]) -> None:
        for remote in itertools.chain.from_iterable(map(tuple, self._runs.values())):
            if remote.item.item_id in item_ids:
                remote.cancel()

    def _flush_soon(self, observer: RunObserver) -> None:
        if observer not in self._unflushed:
            self._unflushed.add(observer)
            asyncio.get_running_loop().call_later(_FLUSH_S, partial(self._death.guard, partial(self._flush, observer)))

    def _flush(self, observer: RunObserver) -> None:
        self._unflushed.discard(observer)
        if observer in self._runs:
            self._report_step(observer)

    def _report_step(self, observer: RunObserver) -> None:
        if not self._runs[observer]:
            del self._runs[observer]
        observer.step()

    async def _metrics(self) -> str:
        assert self._pool is not None  # noqa: S101 - called after loading
        return self._pool.metrics(self._spec.model.model, self._spec.model.version)

    async def _close(self) -> None:
        remotes = itertools.chain.from_iterable(self._runs.values())
        tasks = [*self._helpers, *(remote.task for remote in remotes if remote.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._pool is not None:
            await self._pool.close()
