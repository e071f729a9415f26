"""Estimated and actual cost in cost tokens (prompt tokens plus twice the output tokens). Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Outcome
from fairlane.records import InferenceRequest, ModelVersion, UsageEvent
from fairlane_server.admission_rule import cost_tokens
from stream_processors.dispatcher.scheduling.quantity import Quantity

BYTES_PER_TOKEN = 4
_EXPECTED_OUTPUT_TOKENS = 256
_MIN_RATIO, _MAX_RATIO = 1 / 256, 16.0


@frozen_dataclass(frozen=True, slots=True)
class Cost:
    """An estimate, in tokens.

    Attributes:
        prompt_tokens: at least 1.
        output_tokens: expected; 0 for a model that puts out none.
        cautious_output_tokens: what nine of ten such answers do not exceed, and at least ``output_tokens``; while
            nothing is known of them a usual length, and at most ``output_tokens``.
    """

    prompt_tokens: int
    output_tokens: int
    cautious_output_tokens: int

    @property
    def total(self) -> int:
        """In cost tokens."""
        return cost_tokens(self.prompt_tokens, self.output_tokens)

    @property
    def cautious_total(self) -> int:
        """In cost tokens."""
        return cost_tokens(self.prompt_tokens, self.cautious_output_tokens)


@dataclass(slots=True)
class _PromptRatio:
    """Prompt tokens over the plain estimate."""

    samples: int = 0
    mean: float = 1.0


_Kind = tuple[str, str, int]
"""Tenant, model, and the power of two above the most output tokens that are allowed. Tenant "": of all tenants."""


class CostModel:
    """Learns from actual usage how many tokens a tenant's requests to a model have.

    The length of an answer is learned as a part of what was allowed, separately for each power of two of that: some
    clients ask for the length they expect, others for the longest they can bear. A tenant without answers starts from
    those of all tenants. Averages are exponential with ``smoothing`` as the weight of the newest, after a plain mean
    over the first 1 / ``smoothing``. Keeps ``max_entries`` of each kind and drops the least recently updated. Every
    operation is O(1). For one thread.
    """

    def __init__(self, max_entries: int = 20_000, smoothing: float = 0.1) -> None:
        if max_entries < 1 or not 0 < smoothing <= 1:
            raise ValueError("max_entries must be at least 1, smoothing above 0 and at most 1")
        self._max_entries = max_entries
        self._smoothing = smoothing
        self._prompts: OrderedDict[tuple[str, str], _PromptRatio] = OrderedDict()
        self._answers: OrderedDict[_Kind, Quantity] = OrderedDict()

    def estimate(self, tenant: str, model: ModelVersion, input_bytes: int, max_tokens: int | None) -> Cost:
        """Estimated cost of a request with ``input_bytes`` of input; never more output than it or the model allows."""
        plain = _plain_prompt_tokens(input_bytes)
        ratio = self._prompts.get((tenant, model.model))
        prompt = plain if ratio is None else max(1, round(plain * ratio.mean))
        most = most_output_tokens(model, max_tokens)
        if not most:
            return Cost(prompt, 0, 0)
        kind = most.bit_length()
        answers = self._answers
        known = answers.get((tenant, model.model, kind)) or answers.get((_ALL_TENANTS, model.model, kind))
        if known is None:
            expected = min(most, max_tokens or _EXPECTED_OUTPUT_TOKENS)
            # Charged is what was asked for. But clients allow more than they get: if admission planned with that, a
            # busy pool would refuse the first answers, and never learn how long they are.
            return Cost(prompt, expected, min(expected, _EXPECTED_OUTPUT_TOKENS))
        expected = max(1, min(most, round(most * known.mean)))
        return Cost(prompt, expected, max(expected, min(most, round(most * known.cautious))))

    def learn(self, tenant: str, model: str, input_bytes: int, most_output_tokens: int, usage: UsageEvent) -> None:
        """Learn from the usage of one answered request with counted tokens; other usage is ignored.

        Usage is compared with the input bytes, not with the estimate: the same error of the estimate would otherwise be
        corrected once for every request in flight.

        Args:
            tenant: of the request.
            model: the name of the model that answered.
            input_bytes: as given to ``estimate``; 0 when no longer known: ignored.
            most_output_tokens: allowed by the request and the model; 0 for a model that puts out none.
            usage: of the request.
        """
        if usage.outcome != Outcome.OK or usage.prompt_tokens <= 0 or input_bytes <= 0:
            return
        key = (tenant, model)
        known = self._prompts.get(key)
        if known is None:
            known = self._prompts[key] = _PromptRatio()
            _bound(self._prompts, self._max_entries)
        else:
            self._prompts.move_to_end(key)
        known.samples += 1
        rate = max(self._smoothing, 1 / known.samples)
        ratio = min(_MAX_RATIO, max(_MIN_RATIO, usage.prompt_tokens / _plain_prompt_tokens(input_bytes)))
        known.mean += rate * (ratio - known.mean)
        if most_output_tokens > 0:
            part = min(1.0, max(0, usage.completion_tokens) / most_output_tokens)
            kind = most_output_tokens.bit_length()
            own = self._answers.get((tenant, model, kind))
            if own is None or own.samples < _SAMPLES_OF_EACH or own.samples % _SAMPLES_OF_EACH == 0:
                # What all are expected to do is not decided by those who send most.
                self._learn_answer((_ALL_TENANTS, model, kind), part)
            self._learn_answer((tenant, model, kind), part)

    def _learn_answer(self, kind: _Kind, part: float) -> None:
        known = self._answers.get(kind)
        if known is None:
            prior = self._answers.get((_ALL_TENANTS, *kind[1:]))
            known = self._answers[kind] = Quantity(self._smoothing) if prior is None else prior.as_prior()
            _bound(self._answers, self._max_entries)
        else:
            self._answers.move_to_end(kind)
        known.learn(part)

    def __len__(self) -> int:
        return len(self._prompts)


_ALL_TENANTS = ""
_SAMPLES_OF_EACH = 16
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


def _bound(entries: OrderedDict[_KeyT, _ValueT], most: int) -> None:
    if len(entries) > most:
        entries.popitem(last=False)


def most_output_tokens(model: ModelVersion, max_tokens: int | None) -> int:
    """The longest answer that the request and the model allow."""
    return min(max_tokens or model.max_output_tokens, model.max_output_tokens)


def _plain_prompt_tokens(input_bytes: int) -> int:
    return max(1, input_bytes // BYTES_PER_TOKEN)


def actual_cost(usage: UsageEvent) -> int:
    return cost_tokens(usage.prompt_tokens, usage.completion_tokens)


def correction(charged: int, usage: UsageEvent) -> int:
    """The amount to charge on top of ``charged`` once the request is done; negative: a refund of at most ``charged``.

    An answered request, or one that never ran (expired, cancelled, rejected), settles at its actual cost. A failed one
    is charged more if it spent more and is refunded nothing: poison must not be free. An answer of an engine that
    counts no tokens settles at the estimate.
    """
    spent = actual_cost(usage)
    if usage.outcome == Outcome.FAILED or (usage.outcome == Outcome.OK and spent == 0):
        return max(0, spent - charged)
    return spent - charged


_FALL = 0.1
"""Weight of a new value below the expected one."""


class ContextTokens:
    """Learns the tokens added to a tenant's requests of one kind: with retrieval, in a conversation, or both.

    Rises at once and falls slowly: an estimate that is too low exceeds the dispatch window, one that is too high only
    waits a little. Keeps ``max_entries`` kinds and drops the least recently updated. O(1). For one thread.
    """

    def __init__(self, max_entries: int = 20_000) -> None:
        self._max_entries = max_entries
        self._expected: OrderedDict[tuple[str, bool, bool], float] = OrderedDict()

    def expected(self, tenant: str, request: InferenceRequest) -> int:
        """Expected tokens for this request; 0 without enrichment, or while unknown."""
        key = _kind(tenant, request)
        return round(self._expected.get(key, 0.0)) if any(key[1:]) else 0

    def learn(self, tenant: str, request: InferenceRequest, tokens: int) -> None:
        key = _kind(tenant, request)
        if not any(key[1:]):
            return
        before = self._expected.pop(key, 0.0)
        self._expected[key] = tokens if tokens >= before else before + _FALL * (tokens - before)
        if len(self._expected) > self._max_entries:
            self._expected.popitem(last=False)

    def __len__(self) -> int:
        return len(self._expected)


def _kind(tenant: str, request: InferenceRequest) -> tuple[str, bool, bool]:
    return tenant, request.retrieval is not None, request.conversation_id is not None
