"""The endpoints of one version at work: places for items, tries at other endpoints, checks at an interval, metrics.

Everything runs on one event loop.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fairlane.outcomes import Code
from inference_consumers.engines.protocol import Failure, ItemOutcome
from inference_consumers.engines.remote.balancing import Attempt, AttemptEnd, EndpointBalancer
from inference_consumers.engines.remote.connection import EndpointConnection
from inference_consumers.engines.remote.endpoints import ModelEndpoints
from inference_consumers.engines.remote.errors import (
    EndpointBusyError,
    EndpointFailedError,
    EndpointKeyError,
    EndpointUnreachableError,
    ItemRefusedError,
)

MOST_ENDPOINTS_TRIED = 3
"""Of one item, in one run of it: the consumer tries again what failed at all of them, with a backoff."""

_LONGEST_CHECK_S = 5.0
_CHECK_JITTER = 0.25

ATTEMPTS = "fairlane_endpoint_attempts_total"
FAILURES = "fairlane_endpoint_failures_total"
OUTSTANDING = "fairlane_endpoint_outstanding"
EJECTED = "fairlane_endpoint_ejected"
WAITING = "fairlane_endpoint_waiting"
ENDPOINT_METRICS = (ATTEMPTS, FAILURES, OUTSTANDING, EJECTED, WAITING)
"""They are kept in the engine's process and shown by its consumer."""

Check = Callable[[EndpointConnection], Awaitable[None]]


class NoEndpointError(Exception):
    """No endpoint can take the item."""


class RemoteAnswer(Protocol):
    """One item at one endpoint after another. ``has_text``: some of its text was passed on."""

    @property
    def has_text(self) -> bool: ...

    async def ask(self, connection: EndpointConnection, began: Callable[[], None]) -> ItemOutcome:
        """One try. ``began`` is called when the first part of an answer came. Raises as the connection."""


@dataclass(eq=False, slots=True)
class _Waiter:
    place: "asyncio.Future[Attempt]"
    without: Collection[int]
    ends_at_s: float
    healthy_at_s: float


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """``untried``: the endpoint did not take the item; ``is_busy``: it may when it has rested."""

    why: str
    untried: bool = False
    is_busy: bool = False


class EndpointPool:
    """``check`` asks an endpoint whether it serves the model: EndpointFailedError if not."""

    def __init__(
        self,
        entry: ModelEndpoints,
        check: Check,
        now_s: Callable[[], float] = monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """Raises EndpointKeyError. ``now_s`` is in seconds."""
        self._entry = entry
        self._check = check
        self._now_s = now_s
        self._chance = chance
        self._balancer = EndpointBalancer.of(entry.endpoints, entry.policy)
        self._connections = [EndpointConnection(endpoint, entry) for endpoint in entry.endpoints]
        self._waiting: list[_Waiter] = []

    async def check_all(self) -> list[str]:
        """Check every endpoint once. Returns what is wrong, by endpoint: as many as there are means none is usable."""
        results = await asyncio.gather(*map(self._check_one, range(len(self._connections))))
        return [
            f"{connection.endpoint.label}: {why}"
            for connection, why in zip(self._connections, results, strict=True)
            if why is not None
        ]

    async def keep_checking(self) -> None:
        """Check every endpoint at the interval, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._connections)):
                tasks.create_task(self._keep_checking(index))

    async def outcome_of(self, answer: RemoteAnswer, time_left_s: float = math.inf) -> ItemOutcome:
        """Ask endpoints until one answers, at most MOST_ENDPOINTS_TRIED, each once; one that is busy does not count,
        and may be asked again. After the first text none is: what was passed on cannot be taken back here. Nothing is
        begun or waited for after ``time_left_s``. The failure is ``untried`` if no endpoint had the item."""
        ends_at_s = self._now_s() + time_left_s
        tried: set[int] = set()
        why, untried = "no endpoint is healthy", True
        while not answer.has_text and len(tried) < MOST_ENDPOINTS_TRIED:
            try:
                attempt = await self._place(tried, ends_at_s)
            except NoEndpointError:
                break
            found = await self._ask(answer, attempt, ends_at_s)
            if not isinstance(found, _NoAnswer):
                return found
            # Without the endpoint's name: tenants read this.
            why = f"the server gave no answer: {found.why}"
            untried &= found.untried
            if not found.is_busy:
                tried.add(attempt.index)
        return Failure(Code.ENGINE_ERROR, why, transient=True, untried=untried)

    def tick(self) -> None:
        """Give places to waiting items, and end the wait of those that waited too long. Called a few times a second:
        the end of a rest or of an ejection is no event."""
        self._serve()
        now_s = self._now_s()
        for waiter in tuple(self._waiting):
            is_healthy = self._balancer.is_healthy(waiter.without)
            if is_healthy:
                waiter.healthy_at_s = now_s
            has_waited = bool(waiter.without) or now_s - waiter.healthy_at_s >= self._entry.wait_s
            if now_s >= waiter.ends_at_s or (has_waited and not is_healthy):
                self._waiting.remove(waiter)
                if not waiter.place.done():
                    waiter.place.set_exception(NoEndpointError())

    def metrics(self, model: str, version: str) -> str:
        """In the text format of Prometheus."""
        registry = CollectorRegistry(auto_describe=False)
        labels = [connection.endpoint.label for connection in self._connections]
        registry.register(_EndpointMetrics(model, version, labels, self._balancer, len(self._waiting)))
        return generate_latest(registry).decode()

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def _place(self, without: Collection[int], ends_at_s: float) -> Attempt:
        """Raises NoEndpointError when none but ``without`` is healthy, at once if that is not empty, or else after a
        wait; and when the item's time is over."""
        now_s = self._now_s()
        if now_s >= ends_at_s or (without and not self._balancer.is_healthy(without)):
            raise NoEndpointError
        place = asyncio.get_running_loop().create_future()
        waiter = _Waiter(place, frozenset(without), ends_at_s, healthy_at_s=now_s)
        self._waiting.append(waiter)
        self._serve()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self._end(waiter.place.result(), AttemptEnd.ABANDONED)
            raise

    def _serve(self) -> None:
        """Give places to what waits, first come first served."""
        now_ms = 1_000 * self._now_s()
        for waiter in tuple(self._waiting):
            if waiter.place.done():
                continue
            attempt = self._balancer.choose(now_ms, waiter.without)
            if attempt is not None:
                self._waiting.remove(waiter)
                waiter.place.set_result(attempt)

    async def _ask(self, answer: RemoteAnswer, attempt: Attempt, ends_at_s: float) -> ItemOutcome | _NoAnswer:
        """The outcome, or why the endpoint gave none."""
        left_s, most_s = ends_at_s - self._now_s(), self._entry.total_timeout_s
        has_begun = False

        def began() -> None:
            nonlocal has_begun
            has_begun = True
            self._balancer.began(attempt)

        try:
            async with asyncio.timeout(min(left_s, most_s)):
                outcome = await answer.ask(self._connections[attempt.index], began)
        except ItemRefusedError as error:
            outcome = error.failure
        except EndpointBusyError as error:
            self._end(attempt, AttemptEnd.BUSY, error.rest_s)
            # One that breaks off between two calls of an item has had it.
            return _NoAnswer(str(error), untried=not has_begun, is_busy=not has_begun)
        except EndpointFailedError as error:
            self._end(attempt, AttemptEnd.FAILED)
            return _NoAnswer(str(error), untried=isinstance(error, EndpointUnreachableError) and not has_begun)
        except TimeoutError:
            # How much time an item had is no fault of the endpoint.
            self._end(attempt, AttemptEnd.FAILED if most_s <= left_s else AttemptEnd.ABANDONED)
            return _NoAnswer(f"no answer within {min(left_s, most_s):.3g} s")
        except Exception as error:  # noqa: BLE001 - whatever one server sends, the engine goes on with the others
            self._end(attempt, AttemptEnd.FAILED)
            return _NoAnswer(_unreadable(error))
        except BaseException:
            self._end(attempt, AttemptEnd.ABANDONED)
            raise
        self._end(attempt, AttemptEnd.ANSWERED)
        return outcome

    def _end(self, attempt: Attempt, end: AttemptEnd, rest_s: float = 0.0) -> None:
        self._balancer.ended(attempt, end, 1_000 * self._now_s(), self._chance(), 1_000 * rest_s)
        self._serve()

    async def _keep_checking(self, index: int) -> None:
        while True:
            # Consumers that started together do not check together for ever.
            await asyncio.sleep(self._entry.health_interval_s * (1 - _CHECK_JITTER * self._chance()))
            await self._check_one(index)
            self._serve()

    async def _check_one(self, index: int) -> str | None:
        """What is wrong with the endpoint."""
        connection = self._connections[index]
        why = None
        try:
            connection.read_key()
            async with asyncio.timeout(min(_LONGEST_CHECK_S, self._entry.idle_timeout_s)):
                await self._check(connection)
        except (EndpointFailedError, EndpointKeyError) as error:
            why = str(error)
        except EndpointBusyError:
            # It is up.
            pass
        except TimeoutError:
            why = "no answer to the check in time"
        except Exception as error:  # noqa: BLE001 - as for items
            why = _unreadable(error)
        self._balancer.checked(index, is_ready=why is None)
        return why


def _unreadable(error: Exception) -> str:
    """Not the error's own text: it may quote the answer."""
    return f"its answer cannot be read ({type(error).__name__})"


class _EndpointMetrics(Collector):
    def __init__(
        self, model: str, version: str, labels: Sequence[str], balancer: EndpointBalancer, waiting: int
    ) -> None:
        self._of_model = (model, version)
        self._states = list(zip(labels, balancer.states, strict=True))
        self._waiting = waiting

    def collect(self) -> Iterable[Metric]:
        names = ("model", "version", "endpoint")
        attempts = CounterMetricFamily(ATTEMPTS, "Items sent to an endpoint", labels=names)
        failures = CounterMetricFamily(FAILURES, "Items to which an endpoint gave no answer", labels=names)
        outstanding = GaugeMetricFamily(OUTSTANDING, "Items at an endpoint", labels=names)
        ejected = GaugeMetricFamily(EJECTED, "1 while an endpoint gets nothing but probes", labels=names)
        for label, state in self._states:
            key = (*self._of_model, label)
            attempts.add_metric(key, state.attempts)
            failures.add_metric(key, state.failures)
            outstanding.add_metric(key, state.outstanding)
            ejected.add_metric(key, state.is_ejected)
        waiting = GaugeMetricFamily(WAITING, "Items that wait for an endpoint", labels=("model", "version"))
        waiting.add_metric(self._of_model, self._waiting)
        return (attempts, failures, outstanding, ejected, waiting)
