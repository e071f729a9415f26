"""batching: a language model on the lengths of a production trace, by micro-batches, one at a time, and by arrival.

A usual engine pads a batch to its longest prompt. The project's own prefills in parts, which needs little padding. So
batches by arrival are measured twice: as the engine runs them, and padded, with text in front of each prompt up to the
longest. The aim is against the padded ones; the other shows the batcher's part of the gain.

On a CPU a batch does not reduce the arithmetic of prefill: the gain over one at a time is bounded by that one's time
divided by its prefill's, a figure of its own. All ways answer the same requests on the same engine. They take turns, a
batch each of the one that is furthest behind, so that a change of the machine's load affects all of them.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from time import perf_counter

from benchmarks.cluster import MODELS_DIR, shipped_engine, shipped_model
from benchmarks.load import make_usage, make_work_item
from benchmarks.result import Figure, Result
from benchmarks.service_curve import percentile
from benchmarks.trace import MAX_CONTEXT_TOKENS, TraceSampler, load_trace
from fairlane.names import priority_topic
from fairlane.outcomes import Priority, Task
from fairlane.ownership import Claim, PartitionId
from fairlane.records import (
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
)
from fairlane_server.admission_rule import cost_tokens
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import Engine, EngineItem, ItemOutcome, Outcomes, RunCost, Success
from producers.replay.trace import TraceRow
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
_TENANT = "acme"
_SPARE_TOKENS = 8
"""A prompt that is cut out of a text may have a token more than it had in there."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
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
class EngineBatch:
    """Items for one run of the engine, with so many tokens of padding in their prompts."""

    items: Sequence[EngineItem]
    padding_tokens: int = 0


Batches = Generator[EngineBatch, tuple[float, RunCost], None]
"""One way to put requests into batches. After each it is sent the seconds that the run took, and its cost."""
Text = Callable[[int, Random], str]
"""Text of so many tokens."""


def by_arrival(requests: Sequence[TraceRequest], limits: BatchLimits, padding: Text | None = None) -> Batches:
    """Requests in order of arrival, up to the bounds of a batch, which count the cost of items without padding. With
    ``padding``, each prompt has such text in front of it, up to the length of the longest."""
    random = Random(0)
    left = deque(requests)
    while left:
        batch = [left.popleft()]
        tokens = batch[0].cost_tokens
        while left and len(batch) < limits.max_items and tokens + left[0].cost_tokens <= limits.max_tokens:
            batch.append(left.popleft())
            tokens += batch[-1].cost_tokens
        items = [request.item for request in batch]
        if padding is None:
            yield EngineBatch(items)
            continue
        longest = max(request.prompt_tokens for request in batch)
        missing = [longest - request.prompt_tokens for request in batch]
        yield EngineBatch(
            [
                replace(item, input=replace(item.input, prompt=padding(count, random) + (item.input.prompt or "")))
                if count
                else item
                for item, count in zip(items, missing, strict=True)
            ],
            sum(missing),
        )


def bucketed(requests: Sequence[TraceRequest], limits: BatchLimits) -> Batches:
    """Batches of the micro-batcher, which learns from the runs as in a consumer."""
    batcher = MicroBatcher(limits)
    by_claim = {request.work.claim: request for request in requests}
    for request in requests:
        batcher.add(request.work)
    elapsed_s = 0.0
    while batch := batcher.next_batch(int(1_000 * elapsed_s), idle=True):
        chosen = [by_claim[work.claim] for work in batch.work]
        seconds, cost = yield EngineBatch([request.item for request in chosen])
        elapsed_s += seconds
        tokens = sum(request.cost_tokens for request in chosen)
        padding_tokens = cost.computed_tokens - cost.useful_tokens
        batcher.ran(batch.work[0].model_key, len(chosen), tokens, seconds, padding_tokens=padding_tokens)


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
class WayTotals:
    """Time and tokens of one way."""

    seconds: float = 0.0
    prefill_s: float = 0.0
    batches: int = 0
    items: int = 0
    completion_tokens: int = 0
    useful_tokens: int = 0
    computed_tokens: int = 0

    def ran(self, told: _FirstTexts, batch: EngineBatch, cost: RunCost) -> None:
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
        """ServedRequest tokens per second of the time after the prefill, which gives the first of each answer."""
        decode_s = self.seconds - self.prefill_s
        return (self.completion_tokens - self.items) / decode_s if decode_s > 0 else 0.0


def run(requests: int = REQUESTS) -> Result:
    """One run, all ways in it."""
    model = shipped_model()
    text = manual_text(MODELS_DIR / model.path)
    made = draw_requests(model, text, requests, seed=1)
    limits = BatchLimits(model.max_batch_size, model.max_batch_tokens, timeout_ms=0)
    ways = {
        ONE: by_arrival(made, replace(limits, max_items=1)),
        BUCKETED: bucketed(made, limits),
        ARRIVAL: by_arrival(made, limits),
        PADDED: by_arrival(made, limits, text),
    }
    # A padded row is longer than it is, which the engine cannot know.
    with shipped_engine(replace(model, max_context_tokens=2 * model.max_context_tokens)) as engine:
        _run_batch(engine, EngineBatch([made[0].item]), WayTotals())
        return result(take_turns(engine, ways, requests))


def result(totals: Mapping[str, WayTotals]) -> Result:
    """The figures of one run of all ways."""
    ours = totals[BUCKETED]

    def over(way: str) -> float:
        return ours.tokens_per_s / totals[way].tokens_per_s

    figures = [
        Figure("bucketed: tokens/s divided by one at a time", over(ONE), "ratio", "at least", AIM_ONE),
        Figure("bucketed: tokens/s divided by padded by arrival", over(PADDED), "ratio", "at least", AIM_ARRIVAL),
        Figure("bucketed: tokens/s divided by arrival, unpadded", over(ARRIVAL), "ratio"),
        Figure("one at a time: its time divided by its prefill's", 1 / totals[ONE].prefill_share, "ratio"),
        Figure("bucketed: padding of all computed tokens", ours.padding, "ratio", "at most", AIM_PADDING),
        Figure("padded by arrival: padding of all computed tokens", totals[PADDED].padding, "ratio"),
        Figure(
            "bucketed: decoding, divided by one at a time",
            ours.decode_tokens_per_s / (totals[ONE].decode_tokens_per_s or inf),
            "ratio",
        ),
    ]
    for name, one in totals.items():
        figures += [
            Figure(f"{name}: throughput", one.tokens_per_s, "completion tokens/s"),
            Figure(f"{name}: prefill's part of the time", one.prefill_share, "ratio"),
            Figure(f"{name}: items per batch", one.items / one.batches, "items"),
        ]
    numbers = {f"{name}: {key}": value for name, one in totals.items() for key, value in asdict(one).items()}
    return Result(NAME, tuple(figures), (numbers,))


def take_turns(engine: Engine, ways: Mapping[str, Batches], requests: int) -> dict[str, WayTotals]:
    """Run every way to its end, a batch at a time of the one that has answered the fewest."""
    totals = {name: WayTotals() for name in ways}
    batches = {name: next(way, None) for name, way in ways.items()}
    while left := [name for name in ways if totals[name].items < requests]:
        name = min(left, key=lambda one: totals[one].items)
        batch = batches[name]
        if batch is None:
            raise RuntimeError(f"{name}: only {totals[name].items} of {requests} requests were given out")
        before_s = totals[name].seconds
        cost = _run_batch(engine, batch, totals[name])
        try:
            batches[name] = ways[name].send((totals[name].seconds - before_s, cost))
        except StopIteration:
            batches[name] = None
    return totals


def _run_batch(engine: Engine, batch: EngineBatch, totals: WayTotals) -> RunCost:
    told = _FirstTexts()
    cost = engine.run(batch.items, told)
    totals.ran(told, batch, cost)
    return cost


def manual_text(model_dir: Path) -> Text:
    """Text of the Python manual, in the model's own tokens."""
    from transformers import AutoTokenizer

    text = "\n".join(topics[topic] for topic in sorted(topics))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # The text is longer than the model's context, which the tokenizer would warn of; it never runs as a whole.
    tokenizer.model_max_length = len(text)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    starts = [start for start, _ in encoded["offset_mapping"]]

    def of(tokens: int, random: Random) -> str:
        """From a random place on, give or take a token or two."""
        first = random.randrange(len(starts) - tokens - 1)
        return text[starts[first] : starts[first + tokens]]

    return of


def scale_of(rows: Sequence[TraceRow]) -> float:
    """The factor that makes the 99th percentile of all lengths, prompt and answer together, fit the context."""
    return MAX_CONTEXT_TOKENS / percentile([row.context_tokens + row.generated_tokens for row in rows], FITTING_PART)


def draw_requests(model: ModelVersion, text: Text, count: int, seed: int) -> list[TraceRequest]:
    """Requests in order of arrival, with the cost that a dispatcher would estimate that knows the tenant."""
    rows = load_trace()
    sampler = TraceSampler(rows, seed, scale=scale_of(rows), max_tokens=MAX_CONTEXT_TOKENS - _SPARE_TOKENS)
    random, costs = Random(seed), CostModel()
    for _ in range(TAUGHT):
        size = sampler.size()
        prompt = text(size.prompt_tokens, random)
        usage = make_usage(_TENANT, model, size)
        costs.learn(_TENANT, model.model, len(prompt.encode()), model.max_output_tokens, usage)
    made = []
    for number in range(count):
        size = sampler.size()
        prompt = text(size.prompt_tokens, random)
        parameters = Parameters(max_tokens=min(size.output_tokens, model.max_output_tokens), stream=True)
        request = InferenceRequest(str(number), model.model, Task.GENERATE, RequestInput(prompt=prompt), parameters)
        # As of a client that allows any length: what it allows says nothing of the length.
        cost = costs.estimate(_TENANT, model, len(prompt.encode()), None)
        total = cost_tokens(cost.prompt_tokens, min(cost.output_tokens, parameters.max_tokens or cost.output_tokens))
        expected = {"cost_tokens": total, "prompt_tokens": cost.prompt_tokens}
        item = make_work_item(request, _TENANT, model.pool, number, model_version=model.version, **expected)
        claim = Claim(PartitionId(priority_topic(model.pool, Priority.NORMAL), 0), number, 1)
        made.append(TraceRequest(ReceivedWork(claim, item, len(prompt), received_at_ms=0), size.prompt_tokens))
    return made
