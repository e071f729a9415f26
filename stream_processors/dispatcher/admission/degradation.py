"""Degradation ladder: the steps by which requests are reduced under pressure, and their thresholds. Pure."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Degradation, Priority, RetrievalMode, Task
from fairlane.records import InferenceRequest, Message, ModelVersion, Passage, TenantSpec
from fairlane_server.conversations.turns import newest_half
from stream_processors.dispatcher.intake.validation import size_of_input

LADDER: tuple[Degradation, ...] = (
    Degradation.FEWER_PASSAGES,
    Degradation.SHORTER_RETRIEVAL,
    Degradation.VECTOR_ONLY,
    Degradation.CACHED_ONLY,
    Degradation.NO_RETRIEVAL,
    Degradation.SHORTER_CONTEXT,
    Degradation.CAPPED_MAX_TOKENS,
    Degradation.SMALLER_MODEL,
    Degradation.DEFERRED,
)
"""The steps in the order they are tried; level n takes the first n of them."""

_SUPERSEDED_BY: Mapping[Degradation, frozenset[Degradation]] = {
    Degradation.CACHED_ONLY: frozenset({Degradation.VECTOR_ONLY}),
    Degradation.NO_RETRIEVAL: frozenset(
        {
            Degradation.FEWER_PASSAGES,
            Degradation.SHORTER_RETRIEVAL,
            Degradation.VECTOR_ONLY,
            Degradation.CACHED_ONLY,
        }
    ),
}
_WIDER_THAN: Mapping[RetrievalMode, frozenset[str]] = {
    RetrievalMode.VECTOR: frozenset({RetrievalMode.HYBRID}),
    RetrievalMode.CACHED: frozenset({RetrievalMode.HYBRID, RetrievalMode.VECTOR}),
}
KEPT_MESSAGES = 4
"""Turns of a conversation that are kept, besides all system messages."""

CAPPED_TOKENS = 128
"""Most output tokens of a capped request."""

_SYSTEM = "system"
_ASSISTANT = "assistant"


@frozen_dataclass(frozen=True, slots=True)
class LadderPolicy:
    """Thresholds of the levels.

    Pressure is the predicted finish time over the allowed time, or the predicted time in the queue over the latency
    target if that is more: above 1 a request would be rejected.

    Attributes:
        up_at: for each level but 0 the pressure from which it is entered, rising.
        down_ratio: a level is calm while the pressure is below this fraction of its ``up_at``.
        spared_ratio: a request is spared a level while its own pressure is below this fraction of its ``up_at``. Less
            than ``down_ratio``: a request whose pressure keeps a level up is not spared it.
        up_every_ms: least time between two steps up.
        down_after_ms: calm time before a step down; not less than ``up_every_ms``.
        max_entries: most (pool, tenant) pairs kept; beyond it the least recently used one is at level 0.
    """

    up_at: tuple[float, ...] = (0.50, 0.55, 0.60, 0.65, 0.71, 0.76, 0.81, 0.86, 0.92)
    down_ratio: float = 0.7
    spared_ratio: float = 0.6
    up_every_ms: int = 500
    down_after_ms: int = 5_000
    max_entries: int = 100_000

    def __post_init__(self) -> None:
        rising = all(low <= high for low, high in zip(self.up_at, self.up_at[1:], strict=False))
        if not self.up_at or self.up_at[0] <= 0 or not rising:
            raise ValueError("up_at must rise from above 0")
        if not 0 < self.spared_ratio < self.down_ratio < 1:
            raise ValueError("spared_ratio must be above 0 and below down_ratio, and that below 1")
        if not 0 < self.up_every_ms <= self.down_after_ms:
            raise ValueError("up_every_ms must be above 0 and at most down_after_ms")
        if self.max_entries < 1:
            raise ValueError("max_entries must be at least 1")

    @property
    def forget_after_ms(self) -> int:
        """A pair unused for this long is at level 0: it could have stepped down all levels meanwhile."""
        return len(self.up_at) * self.down_after_ms


DEFAULT_LADDER = LadderPolicy()


@dataclass(slots=True)
class _Rung:
    level: int
    went_up_at_ms: int
    calm_since_ms: int | None
    asked_at_ms: int


class Ladder:
    """The level of every (pool, tenant), with hysteresis, and the part of it that applies to a request.

    No flapping, whatever the pressure: within t milliseconds a level rises at most t / ``up_every_ms`` + 1 times, and
    turns from rising to falling at most t / ``down_after_ms`` + 1 times, because every rise ends the calm that must
    precede a fall. Monotone: of two pairs used at the same times, the one whose pressure was never lower is never at a
    lower level. For one thread.

    Requests of one tenant differ in allowed time and in size, so their pressures differ: ``felt`` spares a request the
    levels far above its own pressure. For requests of one pressure it changes only with the level.
    """

    def __init__(self, policy: LadderPolicy = DEFAULT_LADDER) -> None:
        self._policy = policy
        self._felt_from = tuple(policy.spared_ratio * mark for mark in policy.up_at)
        # Least recently used first.
        self._rungs: OrderedDict[tuple[str, str], _Rung] = OrderedDict()

    def level(self, pool: str, tenant: str, pressure: float, now_ms: int) -> int:
        """The level under ``pressure``: 0 (no degradation) to ``len(up_at)``. Moves by at most one step per call.

        O(1) on average. NaN changes nothing.
        """
        self._forget(now_ms)
        policy, key = self._policy, (pool, tenant)
        rung = self._rungs.get(key)
        if rung is None:
            if not pressure >= policy.up_at[0]:
                return 0
            if len(self._rungs) >= policy.max_entries:
                self._rungs.popitem(last=False)
            self._rungs[key] = _Rung(1, now_ms, None, now_ms)
            return 1
        if now_ms < rung.asked_at_ms:
            # The clock was set back.
            rung.went_up_at_ms = min(rung.went_up_at_ms, now_ms)
            rung.calm_since_ms = None if rung.calm_since_ms is None else min(rung.calm_since_ms, now_ms)
        rung.asked_at_ms = now_ms
        self._rungs.move_to_end(key)
        self._move(rung, pressure, now_ms)
        if rung.level == 0:
            del self._rungs[key]
        return rung.level

    def felt(self, level: int, pressure: float) -> int:
        """The level applied to a request of this pressure: ``level`` or less; ``level`` for NaN."""
        return min(level, bisect_right(self._felt_from, pressure))

    def present_level(self, pool: str, tenant: str, now_ms: int) -> int:
        """The level after the last call of ``level``; 0 once that is long ago."""
        self._forget(now_ms)
        rung = self._rungs.get((pool, tenant))
        return 0 if rung is None else rung.level

    def is_degrading(self, pool: str, now_ms: int) -> bool:
        """Whether requests of any tenant to this pool are degraded. O(pairs with a level)."""
        self._forget(now_ms)
        return any(of_pool == pool for of_pool, _ in self._rungs)

    def _move(self, rung: _Rung, pressure: float, now_ms: int) -> None:
        policy = self._policy
        if rung.level < len(policy.up_at) and pressure >= policy.up_at[rung.level]:
            rung.calm_since_ms = None
            if now_ms - rung.went_up_at_ms >= policy.up_every_ms:
                rung.level += 1
                rung.went_up_at_ms = now_ms
        elif not self._is_calm(rung.level, pressure):
            rung.calm_since_ms = None
        elif rung.calm_since_ms is None:
            rung.calm_since_ms = now_ms
        elif now_ms - rung.calm_since_ms >= policy.down_after_ms:
            rung.level -= 1
            rung.calm_since_ms = now_ms if rung.level and self._is_calm(rung.level, pressure) else None

    def _is_calm(self, level: int, pressure: float) -> bool:
        return pressure < self._policy.up_at[level - 1] * self._policy.down_ratio

    def _forget(self, now_ms: int) -> None:
        while self._rungs:
            key = next(iter(self._rungs))
            # As far in the future it is as old: the clock was set back.
            if abs(now_ms - self._rungs[key].asked_at_ms) < self._policy.forget_after_ms:
                return
            del self._rungs[key]

    def __len__(self) -> int:
        return len(self._rungs)


@frozen_dataclass(frozen=True, slots=True)
class Degraded:
    """A degraded request, its model, and the steps taken."""

    request: InferenceRequest
    model: ModelVersion
    steps: tuple[Degradation, ...] = ()

    @property
    def deferred(self) -> bool:
        """Whether it is left whole and deferred."""
        return Degradation.DEFERRED in self.steps


def degrade(
    request: InferenceRequest,
    level: int,
    forbidden: Container[str],
    model: ModelVersion,
    smaller: ModelVersion | None,
    *,
    backfill: bool,
) -> Degraded:
    """Take those of the first ``level`` steps of the ladder that the tenant did not forbid and that have an effect.

    A step is listed only if its effect remains visible: no narrower search where no retrieval is left. Backfill at the
    last step is left whole and deferred. ``smaller`` is the model's ``smaller_model`` if the tenant may use it; it is
    taken only if it does the task and certainly holds the request. A valid request stays valid, and no part grows.
    """
    if level <= 0:
        return Degraded(request, model)
    allowed = [step for step in LADDER[:level] if step not in forbidden]
    if Degradation.DEFERRED in allowed and backfill:
        return Degraded(request, model, (Degradation.DEFERRED,))
    pointless = frozenset[Degradation]().union(*(_SUPERSEDED_BY.get(step, ()) for step in allowed))
    steps: list[Degradation] = []
    for step in allowed:
        if step is Degradation.SMALLER_MODEL:
            made = _by_smaller_model(request, forbidden, model, smaller)
            request, model = made.request, made.model
            steps += [taken for taken in made.steps if taken not in steps]
        elif step is Degradation.SHORTER_RETRIEVAL:
            # The enrichment stage gives it half of the budget. Backfill has time.
            if request.retrieval is not None and step not in pointless and not backfill:
                steps.append(step)
        elif step not in pointless:
            changed = _without(request, step, model)
            if changed != request:
                request = changed
                steps.append(step)
    return Degraded(request, model, tuple(steps))


def saved(request: InferenceRequest, spec: TenantSpec, model: ModelVersion, smaller: ModelVersion | None) -> Degraded:
    """The request as it costs less: by a smaller model, and in the next lower class that the tenant may use. Those of
    the two steps that the tenant did not forbid and that have an effect; ``smaller`` as in ``degrade``."""
    forbidden = spec.forbidden_degradations
    made = Degraded(request, model)
    if Degradation.SMALLER_MODEL not in forbidden:
        made = _by_smaller_model(request, forbidden, model, smaller)
    lower = tuple(Priority)[tuple(Priority).index(Priority(request.priority)) + 1 :]
    priority = next((one for one in lower if one in spec.classes), None)
    if priority is None or Degradation.LOWER_CLASS in forbidden:
        return made
    return Degraded(replace(made.request, priority=priority.value), made.model, (*made.steps, Degradation.LOWER_CLASS))


@frozen_dataclass(frozen=True, slots=True)
class Reduced:
    """A requeued request with its passages and history, and the steps taken for the retry, repeated ones included."""

    request: InferenceRequest
    passages: tuple[Passage, ...]
    steps: tuple[Degradation, ...] = ()
    history: tuple[Message, ...] = ()


def reduced_context(
    request: InferenceRequest,
    passages: tuple[Passage, ...],
    forbidden: Container[str] = (),
    history: tuple[Message, ...] = (),
) -> Reduced:
    """Requeued work with reduced context: half its passages, half the messages that a degraded one keeps, and the newer
    half of its history.

    Unchanged, with no steps, if there is nothing to reduce.
    """
    whole, steps = (request, passages), []
    if Degradation.FEWER_PASSAGES not in forbidden:
        request = _fewer_passages(request)
        passages = passages[: len(passages) // 2]
        if (request, passages) != whole:
            steps.append(Degradation.FEWER_PASSAGES)
    if Degradation.SHORTER_CONTEXT not in forbidden:
        shorter, newer = _shorter_context(request, max(1, KEPT_MESSAGES // 2)), newest_half(history)
        if (shorter, newer) != (request, history):
            gone = bool(history) and not newer
            request, history = shorter, newer
            steps.append(Degradation.NO_HISTORY if gone else Degradation.SHORTER_CONTEXT)
    return Reduced(request, passages, tuple(steps), history)


def _without(request: InferenceRequest, step: Degradation, model: ModelVersion) -> InferenceRequest:
    match step:
        case Degradation.FEWER_PASSAGES:
            return _fewer_passages(request)
        case Degradation.VECTOR_ONLY:
            return _narrower_retrieval(request, RetrievalMode.VECTOR)
        case Degradation.CACHED_ONLY:
            return _narrower_retrieval(request, RetrievalMode.CACHED)
        case Degradation.NO_RETRIEVAL:
            return replace(request, retrieval=None)
        case Degradation.SHORTER_CONTEXT:
            return _shorter_context(request, KEPT_MESSAGES)
        case Degradation.CAPPED_MAX_TOKENS:
            return _capped(request, model, CAPPED_TOKENS)
        case _:
            return request


def _fewer_passages(request: InferenceRequest) -> InferenceRequest:
    if request.retrieval is None or request.retrieval.top_k < 2:
        return request
    return replace(request, retrieval=replace(request.retrieval, top_k=request.retrieval.top_k // 2))


def _narrower_retrieval(request: InferenceRequest, mode: RetrievalMode) -> InferenceRequest:
    if request.retrieval is None or request.retrieval.mode not in _WIDER_THAN[mode]:
        return request
    return replace(request, retrieval=replace(request.retrieval, mode=mode.value))


def _shorter_context(request: InferenceRequest, kept: int) -> InferenceRequest:
    if request.conversation_id is not None:
        # Its messages become part of the conversation for good; the history is shortened instead.
        return request
    messages = request.input.messages or ()
    turns = [index for index, message in enumerate(messages) if message.role != _SYSTEM]
    if len(turns) <= kept:
        return request
    last = turns[-kept:]
    # Chat templates require the user to begin: an answer without its question is dropped too.
    while len(last) > 1 and messages[last[0]].role == _ASSISTANT:
        last.pop(0)
    stays = frozenset(last)
    shorter: tuple[Message, ...] = tuple(
        message for index, message in enumerate(messages) if message.role == _SYSTEM or index in stays
    )
    if not any(messages[index].content for index in last):
        # Only empty turns would be left: nothing to answer.
        return request
    return replace(request, input=replace(request.input, messages=shorter))


def _capped(request: InferenceRequest, model: ModelVersion, most: int) -> InferenceRequest:
    if request.task != Task.GENERATE:
        return request
    if model.max_output_tokens:
        most = min(most, max(1, model.max_output_tokens // 2))
    asked = request.parameters.max_tokens or model.max_output_tokens
    return request if asked and asked <= most else _with_max_tokens(request, most)


def _with_max_tokens(request: InferenceRequest, max_tokens: int) -> InferenceRequest:
    return replace(request, parameters=replace(request.parameters, max_tokens=max_tokens))


def _by_smaller_model(
    request: InferenceRequest, forbidden: Container[str], model: ModelVersion, smaller: ModelVersion | None
) -> Degraded:
    """The request for the smaller model, unchanged if that cannot serve it."""
    if smaller is None or not _holds(smaller, request, model, forbidden):
        return Degraded(request, model)
    within = _within(request, smaller)
    is_capped = request.task == Task.GENERATE and within != request
    steps = (Degradation.CAPPED_MAX_TOKENS, Degradation.SMALLER_MODEL) if is_capped else (Degradation.SMALLER_MODEL,)
    return Degraded(replace(within, model=smaller.model), smaller, steps)


def _holds(smaller: ModelVersion, request: InferenceRequest, model: ModelVersion, forbidden: Container[str]) -> bool:
    """Whether the smaller model can serve the request: another model, same task, room for input and output."""
    if smaller.model == model.model or request.task not in smaller.tasks:
        return False
    asked = request.parameters.max_tokens
    if request.task == Task.GENERATE:
        if asked is None and smaller.max_output_tokens != model.max_output_tokens:
            # Its default could be longer, or amount to a cap.
            return False
        if _within(request, smaller) != request and Degradation.CAPPED_MAX_TOKENS in forbidden:
            return False
    if smaller.max_context_tokens >= model.max_context_tokens:
        return True
    # A token takes at least a byte, so this certainly fits.
    output_tokens = (asked or model.max_output_tokens) if request.task == Task.GENERATE else 0
    return size_of_input(request.input) + output_tokens <= smaller.max_context_tokens


def _within(request: InferenceRequest, model: ModelVersion) -> InferenceRequest:
    asked = request.parameters.max_tokens
    if asked is None or not 0 < model.max_output_tokens < asked:
        return request
    return _with_max_tokens(request, model.max_output_tokens)
