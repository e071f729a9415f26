"""batching: a language model on the lengths of a production trace, by micro-batches, one at a time, and by arrival.

A usual engine pads a batch to its longest prompt. The project's own prefills in parts, which needs little padding. So
batches by arrival are measured twice: as the engine runs them, and padded, with text in front of each prompt up to the
longest. The aim is against the padded ones; the other shows the batcher's part of the gain.

On a CPU a batch does not reduce the arithmetic of prefill: the gain over one at a time is bounded by that one's time
divided by its prefill's, a figure of its own. All ways answer the same requests on the same engine. They take turns, a
batch each of the one that is furthest behind, so that a change of the machine's load affects all of them.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from time import perf_counter
from typing import Protocol, Self

from benchmarks.observed import make_work_item
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from benchmarks.trace import MAX_CONTEXT_TOKENS, RequestSize, TraceRow, TraceSampler, load_trace
from fairlane.models import load_models
from fairlane.names import priority_topic
from fairlane.outcomes import Outcome, Priority, Task
from fairlane.ownership import Claim, PartitionId
from fairlane.records import (
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
    SourceCoordinate,
    UsageEvent,
)
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec, ItemOutcome, Outcomes, RunCost, Success
from inference_consumers.engines.registry import create_engine
from stream_processors.dispatcher.scheduling.cost import CostModel

NAME = "batching"
REQUESTS = 48
TAUGHT = 100
AIM_ONE, AIM_ARRIVAL, AIM_PADDING = 5.0, 1.3, 0.15
FITTING_PART = 0.99
ONE, BUCKETED, ARRIVAL, PADDED = "one at a time", "bucketed", "by arrival", "padded by arrival"
HOW = (
    f"one run of {REQUESTS} requests that all wait from the start, in the bounds that deploy/models.yaml sets, in "
    "float32. Their sizes are rows of the trace, prompt and answer multiplied by one factor, the one that makes the "
    f"99th percentile of the sum of both {MAX_CONTEXT_TOKENS:,} tokens (of longer ones the answer is cut to fit, and "
    "then the prompt); prompts are text of the Python manual, answers greedy and cut at the row's length. The batcher "
    f"knows of them what a dispatcher would estimate that has seen {TAUGHT} others. Padded by arrival: batches of the "
    "same bounds with text in front of each prompt up to the longest, as an engine computes them that pads"
)
_MODEL = "smollm2-135m-instruct"
_MODELS_DIR = Path(".fairlane/models")
_TENANT = "acme"
_SPARE_TOKENS = 8
"""A prompt that is cut out of a text may have a token more than it had in there."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the dispatcher hands it on; ``prompt_tokens`` is its true length."""

    work: ReceivedWork
    prompt_tokens: int

    @property
    def item(self) -> EngineItem:
        request = self.work.item.request
        return EngineItem(request.request_id, request.task, request.input, request.parameters)

    @property
    def cost_tokens(self) -> int:
        return self.work.item.cost_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """What the engine is given: the items of some requests, with so many tokens of padding in their prompts."""

    requests: Sequence[Request]
    items: Sequence[EngineItem]
    padding_tokens: int = 0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Without padding."""
        return cls(requests, [request.item for request in requests])


class TextSource(Protocol):
    """Where prompts come from."""

    def of(self, tokens: int, random: Random) -> str: ...


class Way(Protocol):
    """How requests are put into batches."""

    def next_batch(self, elapsed_s: float) -> Batch:
        """The next one to run; empty when all are done."""

    def ran(self, batch: Batch, seconds: float, cost: RunCost) -> None:
        """It was run."""


class ByArrival:
    """Requests in order of arrival, up to the bounds of a batch. The bounds count the cost of items without padding."""

    def __init__(self, requests: Sequence[Request], limits: BatchLimits) -> None:
        self._left = list(reversed(requests))
        self._limits = limits

    def next_batch(self, elapsed_s: float) -> Batch:  # noqa: ARG002 - a Way; nothing is waited for
        batch: list[Request] = []
        tokens = 0
        while self._left and len(batch) < self._limits.max_items:
            tokens += self._left[-1].cost_tokens
            if batch and tokens > self._limits.max_tokens:
                break
            batch.append(self._left.pop())
        return Batch.of(batch)

    def ran(self, batch: Batch, seconds: float, cost: RunCost) -> None: ...


class PaddedByArrival(ByArrival):
    """The same batches, each prompt with text in front of it up to the length of the longest."""

    def __init__(self, requests: Sequence[Request], limits: BatchLimits, prompts: TextSource) -> None:
        super().__init__(requests, limits)
        self._prompts = prompts
        self._random = Random(0)

    def next_batch(self, elapsed_s: float) -> Batch:
        requests = super().next_batch(elapsed_s).requests
        longest = max((request.prompt_tokens for request in requests), default=0)
        items = [self._padded(request, longest - request.prompt_tokens) for request in requests]
        return Batch(requests, items, sum(longest - request.prompt_tokens for request in requests))

    def _padded(self, request: Request, tokens: int) -> EngineItem:
        item = request.item
        padding = self._prompts.of(tokens, self._random) if tokens else ""
        return replace(item, input=replace(item.input, prompt=padding + (item.input.prompt or "")))


class Bucketed:
    """Batches of the micro-batcher, which learns from the runs as in a consumer."""

    def __init__(self, requests: Sequence[Request], limits: BatchLimits) -> None:
        self._batcher = MicroBatcher(limits)
        self._by_claim = {request.work.claim: request for request in requests}
        for request in requests:
            self._batcher.add(request.work)

    def next_batch(self, elapsed_s: float) -> Batch:
        batch = self._batcher.next_batch(int(1_000 * elapsed_s), idle=True)
        return Batch.of([] if batch is None else [self._by_claim[work.claim] for work in batch.work])

    def ran(self, batch: Batch, seconds: float, cost: RunCost) -> None:
        tokens = sum(request.cost_tokens for request in batch.requests)
        key = batch.requests[0].work.model_key
        padding_tokens = cost.computed_tokens - cost.useful_tokens
        self._batcher.ran(key, len(batch.requests), tokens, seconds, padding_tokens=padding_tokens)


class _FirstTexts(Outcomes):
    """Also notes when every item had its first text, or its end: that is the prefill."""

    def __init__(self) -> None:
        super().__init__()
        self.started_at_s = perf_counter()
        self.prefill_s = 0.0

    def text(self, index: int, delta: str) -> None:
        if index not in self.texts:
            self.prefill_s = perf_counter() - self.started_at_s
        super().text(index, delta)

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        if index not in self.texts:
            self.prefill_s = perf_counter() - self.started_at_s
        super().finished(index, outcome)


@dataclass(slots=True)
class Tally:
    """Time and tokens of one way."""

    seconds: float = 0.0
    prefill_s: float = 0.0
    batches: int = 0
    items: int = 0
    completion_tokens: int = 0
    useful_tokens: int = 0
    computed_tokens: int = 0

    def ran(self, told: _FirstTexts, batch: Batch, cost: RunCost) -> None:
        """A batch is done. Raises RuntimeError when an item of it failed."""
        self.seconds += perf_counter() - told.started_at_s
        self.prefill_s += told.prefill_s
        self.batches += 1
        self.useful_tokens += cost.useful_tokens - batch.padding_tokens
        self.computed_tokens += cost.computed_tokens
        for outcome in told.by_index.values():
            if not isinstance(outcome, Success):
                raise RuntimeError(f"a request failed: {outcome}")  # noqa: TRY004 - no wrong type, a failed benchmark
            self.items += 1
            self.completion_tokens += outcome.usage.completion_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.completion_tokens / self.seconds

    @property
    def padding(self) -> float:
        """Its part of all tokens that were computed."""
        return 1 - self.useful_tokens / self.computed_tokens

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Completion tokens per second of the time after the prefill, which gives the first of each answer."""
        decode_s = self.seconds - self.prefill_s
        return (self.completion_tokens - self.items) / decode_s if decode_s > 0 else 0.0


def run(requests: int = REQUESTS) -> Result:
    """One run, all ways in it."""
    model = next(one for one in load_models(Path("deploy/models.yaml")) if one.model == _MODEL)
    # A padded row is longer than it is, which the engine cannot know.
    roomy = replace(model, max_context_tokens=2 * model.max_context_tokens)
    engine = create_engine(EngineSpec(roomy, str(_MODELS_DIR), device=os.environ.get("DEVICE", "auto")))
    engine.load()
    prompts = Prompts(_MODELS_DIR / model.path)
    made = draw_requests(model, prompts, requests, seed=1)
    limits = BatchLimits(model.max_batch_size, model.max_batch_tokens, timeout_ms=0)
    ways: dict[str, Way] = {
        ONE: ByArrival(made, replace(limits, max_items=1)),
        BUCKETED: Bucketed(made, limits),
        ARRIVAL: ByArrival(made, limits),
        PADDED: PaddedByArrival(made, limits, prompts),
    }
    try:
        _run_batch(engine, Batch.of(made[:1]), Tally())
        tallies = take_turns(engine, ways, requests)
    finally:
        engine.close()
    return result(tallies)


def result(tallies: Mapping[str, Tally]) -> Result:
    """The figures of one run of all ways."""
    bucketed = tallies[BUCKETED]

    def over(way: str) -> float:
        return bucketed.tokens_per_s / tallies[way].tokens_per_s

    figures = [
        Figure("bucketed: tokens/s divided by one at a time", over(ONE), "ratio", "at least", AIM_ONE),
        Figure("bucketed: tokens/s divided by padded by arrival", over(PADDED), "ratio", "at least", AIM_ARRIVAL),
        Figure("bucketed: tokens/s divided by arrival, unpadded", over(ARRIVAL), "ratio"),
        Figure("one at a time: its time divided by its prefill's", 1 / tallies[ONE].prefill_share, "ratio"),
        Figure("bucketed: padding of all computed tokens", bucketed.padding, "ratio", "at most", AIM_PADDING),
        Figure("padded by arrival: padding of all computed tokens", tallies[PADDED].padding, "ratio"),
        Figure(
            "bucketed: decoding, divided by one at a time",
            bucketed.decode_tokens_per_s / (tallies[ONE].decode_tokens_per_s or inf),
            "ratio",
        ),
    ]
    for name, tally in tallies.items():
        figures += [
            Figure(f"{name}: throughput", tally.tokens_per_s, "completion tokens/s"),
            Figure(f"{name}: prefill's part of the time", tally.prefill_share, "ratio"),
            Figure(f"{name}: items per batch", tally.items / tally.batches, "items"),
        ]
    numbers = {f"{name}: {key}": value for name, tally in tallies.items() for key, value in asdict(tally).items()}
    return Result(NAME, tuple(figures), (numbers,))


def take_turns(engine: Engine, ways: Mapping[str, Way], requests: int) -> dict[str, Tally]:
    """Run every way to its end, a batch at a time of the one that has answered the fewest."""
    tallies = {name: Tally() for name in ways}
    while left := [name for name in ways if tallies[name].items < requests]:
        name = min(left, key=lambda one: tallies[one].items)
        batch = ways[name].next_batch(tallies[name].seconds)
        if not batch.requests:
            raise RuntimeError(f"{name}: only {tallies[name].items} of {requests} requests were given out")
        before_s = tallies[name].seconds
        cost = _run_batch(engine, batch, tallies[name])
        ways[name].ran(batch, tallies[name].seconds - before_s, cost)
    return tallies


def _run_batch(engine: Engine, batch: Batch, tally: Tally) -> RunCost:
    told = _FirstTexts()
    cost = engine.run(batch.items, told)
    tally.ran(told, batch, cost)
    return cost


class Prompts:
    """Real text of any length, in the model's own tokens."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._text = "\n".join(topics[topic] for topic in sorted(topics))
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        # The text is longer than the model's context, which the tokenizer would warn of; nobody runs it whole.
        tokenizer.model_max_length = len(self._text)
        encoded = tokenizer(self._text, return_offsets_mapping=True, add_special_tokens=False)
        self._starts = [start for start, _ in encoded["offset_mapping"]]

    def of(self, tokens: int, random: Random) -> str:
        """So many tokens of it from a random place on, to one or two."""
        first = random.randrange(len(self._starts) - tokens - 1)
        return self._text[self._starts[first] : self._starts[first + tokens]]


def scale_of(rows: Sequence[TraceRow]) -> float:
    """The factor that makes the 99th percentile of all lengths, prompt and answer together, fit the context."""
    return MAX_CONTEXT_TOKENS / percentile([row.context_tokens + row.generated_tokens for row in rows], FITTING_PART)


def draw_requests(model: ModelVersion, prompts: TextSource, count: int, seed: int) -> list[Request]:
    """Requests in order of arrival, with the cost that a dispatcher would estimate that knows the tenant."""
    rows = load_trace()
    sampler = TraceSampler(rows, seed, scale=scale_of(rows), max_tokens=MAX_CONTEXT_TOKENS - _SPARE_TOKENS)
    random, costs = Random(seed), CostModel()
    for _ in range(TAUGHT):
        size = sampler.size()
        _teach(costs, model, prompts.of(size.prompt_tokens, random), size)
    return [_request(number, model, costs, sampler.size(), prompts, random) for number in range(count)]


def _teach(costs: CostModel, model: ModelVersion, prompt: str, size: RequestSize) -> None:
    usage = UsageEvent(
        request_id="taught",
        tenant=_TENANT,
        pool=model.pool,
        model=model.model,
        model_version=model.version,
        priority_class=Priority.NORMAL,
        outcome=Outcome.OK,
        code=None,
        prompt_tokens=size.prompt_tokens,
        completion_tokens=size.output_tokens,
        cached_tokens=0,
        cost_tokens=size.cost_tokens,
        engine_ms=0,
        occurred_at_ms=0,
        work=SourceCoordinate("taught", 0, 0),
    )
    costs.learn(_TENANT, model.model, len(prompt.encode()), usage)


def _request(
    number: int, model: ModelVersion, costs: CostModel, size: RequestSize, prompts: TextSource, random: Random
) -> Request:
    prompt = prompts.of(size.prompt_tokens, random)
    parameters = Parameters(max_tokens=min(size.output_tokens, model.max_output_tokens), stream=True)
    request = InferenceRequest(str(number), model.model, Task.GENERATE, RequestInput(prompt=prompt), parameters)
    cost = costs.estimate(_TENANT, model, len(prompt.encode()), parameters.max_tokens)
    expected = {"cost_tokens": cost.total, "prompt_tokens": cost.prompt_tokens}
    item = make_work_item(request, _TENANT, model.pool, number, model_version=model.version, **expected)
    claim = Claim(PartitionId(priority_topic(model.pool, Priority.NORMAL), 0), number, 1)
    return Request(ReceivedWork(claim, item, len(prompt), received_at_ms=0), size.prompt_tokens)
