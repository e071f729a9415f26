"""pipeline-efficiency: tokens per second through Kafka and Fairlane, beside the same engine called directly.

torch: a backlog runs through dispatcher and consumer. The replies tell which requests ran together; the engine in this
process is then given exactly those batches, one after the other.

vLLM makes no batches: its asynchronous engine is given all requests at once, in a process of its own
(``vllm_direct``). ``SKIP_VLLM=1`` leaves this part out.
"""

import os
import random
import sys
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import yaml

from benchmarks.cluster import MODELS_DIR, cluster, shipped_engine, shipped_model
from benchmarks.load import REQUEST_TIMEOUT_MS, LoadGenerator, Observed, Planned
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import UNBOUNDED, UNBOUNDED_TENANT, consumer, dispatcher
from benchmarks.vllm_direct import DirectVllm, check_python
from deploy.local.services import MODELS_FILE
from fairlane.records import InferenceRequest, ModelVersion, Parameters, RequestInput
from fairlane.settings import Settings
from inference_consumers.engines.protocol import EngineItem, Outcomes

NAME = "pipeline-efficiency"
HOW = MEDIAN_OF_REPETITIONS
AIM_TORCH = 0.92
AIM_VLLM = 0.88
REQUESTS = 128
ANSWER_TOKENS = (48, 48)
VLLM_ANSWER_TOKENS = (16, 80)
"""From, to: vLLM's items join and leave one by one when their answers differ in length."""
_TENANT = "acme"
_TIMEOUT_S = 300.0
_WORDS = ("alpha", "river", "of", "some", "words", "that", "the", "model", "goes", "on", "from", "nobody", "reads")


def run() -> Result:
    """Three repetitions of the same requests; the ratio of the two speeds in each. Raises VllmMissingError."""
    with_vllm = os.environ.get("SKIP_VLLM") != "1"
    python = Settings().vllm_python
    if with_vllm:
        # Now, and not after the minutes of the other part.
        check_python(python)
    figures, runs = _run_torch()
    if with_vllm:
        more_figures, more_runs = _run_vllm(python)
        figures, runs = figures + more_figures, runs + more_runs
    else:
        print(f"{NAME}: SKIP_VLLM=1, vLLM is not measured", file=sys.stderr)
    return Result(NAME, figures, runs)


def _run_torch() -> tuple[tuple[Figure, ...], tuple[dict[str, float], ...]]:
    model = shipped_model()
    with (
        cluster(
            [dispatcher(env=UNBOUNDED), consumer(pool=model.pool)], tenants=[{"tenant": _TENANT, **UNBOUNDED_TENANT}]
        ) as running,
        LoadGenerator(running.settings, (_TENANT,)) as load,
        shipped_engine(model) as engine,
    ):
        answered(load, _TENANT, requests_for(model, -1))

        def measure(number: int) -> dict[str, float]:
            requests = requests_for(model, number)
            answers = answered(load, _TENANT, requests)
            tokens, through = _tokens_and_seconds(answers)
            batches: dict[int, list[EngineItem]] = defaultdict(list)
            for request, answer in zip(requests, answers, strict=True):
                item = EngineItem(request.request_id, request.task, request.input, request.parameters)
                batches[answer.engine_started_at_ms].append(item)
            started = perf_counter()
            for _, batch in sorted(batches.items()):
                engine.run(batch, Outcomes())
            direct = perf_counter() - started
            return {
                "through_tokens_per_s": tokens / through,
                "direct_tokens_per_s": tokens / direct,
                "ratio": direct / through,
                "items_per_batch": len(requests) / len(batches),
            }

        runs = repeated(measure)
    figures = (
        Figure("torch: tokens/s divided by the engine's own", median_of(runs, "ratio"), "ratio", "at least", AIM_TORCH),
        Figure("torch: through Fairlane", median_of(runs, "through_tokens_per_s"), "completion tokens/s"),
        Figure("torch: the engine alone", median_of(runs, "direct_tokens_per_s"), "completion tokens/s"),
        Figure("torch: items per batch", median_of(runs, "items_per_batch"), "items"),
    )
    return figures, runs


def _run_vllm(python: Path) -> tuple[tuple[Figure, ...], tuple[dict[str, float], ...]]:
    model = replace(shipped_model(), engine="vllm")
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    models = [{**entry, "engine": "vllm"} for entry in entries if entry["model"] == model.model]
    # Served alone: another engine would take its share of the machine.
    del models[0]["smaller_model"]
    with (
        DirectVllm(python, model, MODELS_DIR) as direct,
        cluster([dispatcher(env=UNBOUNDED), consumer(pool=model.pool)], tenants=tenants, models=models) as running,
        LoadGenerator(running.settings, (_TENANT,)) as load,
    ):
        direct.wait_loaded()

        def measure(number: int) -> dict[str, float]:
            return measure_vllm(load, _TENANT, direct, requests_for(model, number, VLLM_ANSWER_TOKENS))

        measure(-1)
        runs = repeated(measure)
    figures = (
        Figure("vLLM: tokens/s divided by its own", median_of(runs, "vllm_ratio"), "ratio", "at least", AIM_VLLM),
        Figure("vLLM: through Fairlane", median_of(runs, "vllm_through_tokens_per_s"), "completion tokens/s"),
        Figure("vLLM: alone", median_of(runs, "vllm_direct_tokens_per_s"), "completion tokens/s"),
    )
    return figures, runs


def answered(load: LoadGenerator, tenant: str, requests: Sequence[InferenceRequest]) -> list[Observed]:
    """Publish these all at once. Returns their answers in the order of the requests.

    Raises TimeoutError, or RuntimeError when a request was not served.
    """
    load.start([Planned.of(request, tenant, load.codec) for request in requests])
    load.wait_published(_TIMEOUT_S)
    load.wait_answered(_TIMEOUT_S)
    observed = {one.request_id: one for one in load.observed()}
    answers = [observed[request.request_id] for request in requests]
    if failed := [f"{one.outcome} {one.code}" for one in answers if not one.served]:
        raise RuntimeError(f"{len(failed)} requests were not served, for instance {failed[0]}")
    return answers


def measure_vllm(
    load: LoadGenerator, tenant: str, direct: DirectVllm, requests: Sequence[InferenceRequest]
) -> dict[str, float]:
    """The speed of both at the same requests, one after the other: each has the machine to itself."""
    answers = answered(load, tenant, requests)
    tokens, seconds = _tokens_and_seconds(answers)
    through = tokens / seconds
    took = direct.answer(requests)
    alone = took.completion_tokens / took.seconds
    return {"vllm_through_tokens_per_s": through, "vllm_direct_tokens_per_s": alone, "vllm_ratio": through / alone}


def requests_for(
    model: ModelVersion, seed: int, answer_tokens: tuple[int, int] = ANSWER_TOKENS, count: int | None = None
) -> list[InferenceRequest]:
    """Requests whose prompts, and lengths of answers, are the same for a seed; REQUESTS of them."""
    drawn = random.Random(seed)
    return [
        InferenceRequest(
            str(uuid.uuid4()),
            model.model,
            "generate",
            RequestInput(prompt=" ".join(drawn.choices(_WORDS, k=drawn.randint(20, 120)))),
            Parameters(max_tokens=drawn.randint(*answer_tokens)),
            timeout_ms=REQUEST_TIMEOUT_MS,
        )
        for _ in range(count or REQUESTS)
    ]


def _tokens_and_seconds(answers: Sequence[Observed]) -> tuple[int, float]:
    """Completion tokens, and the time from the start of the first batch to the last committed reply."""
    first_ms = min(answer.engine_started_at_ms for answer in answers)
    seconds = (max(answer.replied_at_ms for answer in answers) - first_ms) / 1_000
    return sum(answer.completion_tokens for answer in answers), seconds
