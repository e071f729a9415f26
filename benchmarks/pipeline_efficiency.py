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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import yaml

from benchmarks.cluster import cluster
from benchmarks.load import LoadGenerator, Planned
from benchmarks.observed import REQUEST_TIMEOUT_MS, Observed
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import UNBOUNDED, UNBOUNDED_TENANT
from benchmarks.vllm_direct import DirectVllm, check_python
from deploy.local.services import Service
from fairlane.models import load_models
from fairlane.records import InferenceRequest, ModelVersion, Parameters, RequestInput
from fairlane.settings import Settings
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec, Outcomes
from inference_consumers.engines.registry import create_engine

NAME = "pipeline-efficiency"
HOW = MEDIAN_OF_REPETITIONS
AIM_TORCH = 0.92
AIM_VLLM = 0.88
REQUESTS = 128
ANSWER_TOKENS = (48, 48)
VLLM_ANSWER_TOKENS = (16, 80)
"""From, to: vLLM's items join and leave one by one when their answers differ in length."""
_TENANT = "acme"
_MODEL = "smollm2-135m-instruct"
_MODELS_FILE = Path("deploy/models.yaml")
_MODELS_DIR = Path(".fairlane/models")
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


Part = tuple[tuple[Figure, ...], tuple[dict[str, float], ...]]


def _run_torch() -> Part:
    model = shipped_model()
    engine = create_engine(EngineSpec(model, str(_MODELS_DIR), device=os.environ.get("DEVICE", "auto")))
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    with (
        cluster(_services(model), tenants=tenants) as running,
        LoadGenerator(running.settings, (_TENANT,)) as load,
    ):
        answered(load, _TENANT, requests_for(model, -1))
        engine.load()

        def measure(number: int) -> dict[str, float]:
            requests = requests_for(model, number)
            answers = answered(load, _TENANT, requests)
            batches = _batches(requests, answers)
            through = _through_s(answers)
            direct = sum(_direct_s(engine, batch) for batch in batches)
            tokens = _tokens(answers)
            return {
                "through_tokens_per_s": tokens / through,
                "direct_tokens_per_s": tokens / direct,
                "ratio": direct / through,
                "items_per_batch": len(requests) / len(batches),
            }

        runs = repeated(measure)
    engine.close()
    figures = (
        Figure("torch: tokens/s divided by the engine's own", median_of(runs, "ratio"), "ratio", "at least", AIM_TORCH),
        Figure("torch: through Fairlane", median_of(runs, "through_tokens_per_s"), "completion tokens/s"),
        Figure("torch: the engine alone", median_of(runs, "direct_tokens_per_s"), "completion tokens/s"),
        Figure("torch: items per batch", median_of(runs, "items_per_batch"), "items"),
    )
    return figures, runs


def _run_vllm(python: Path) -> Part:
    model = replace(shipped_model(), engine="vllm")
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    with (
        DirectVllm(python, model, _MODELS_DIR) as direct,
        cluster(_services(model), tenants=tenants, models=_vllm_entries()) as running,
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
    through = _tokens(answers) / _through_s(answers)
    took = direct.answer(requests)
    alone = took.completion_tokens / took.seconds
    return {"vllm_through_tokens_per_s": through, "vllm_direct_tokens_per_s": alone, "vllm_ratio": through / alone}


def shipped_model() -> ModelVersion:
    """The language model of the project."""
    [model] = [one for one in load_models(_MODELS_FILE) if one.model == _MODEL]
    return model


def _vllm_entries() -> list[Mapping[str, object]]:
    entries = yaml.safe_load(_MODELS_FILE.read_text(encoding="utf-8"))["models"]
    return [{**entry, "engine": "vllm"} for entry in entries if entry["model"] == _MODEL]


def _services(model: ModelVersion) -> list[Service]:
    return [
        Service("dispatcher-1", ("-m", "stream_processors.dispatcher"), UNBOUNDED),
        Service("consumer-1", ("-m", "inference_consumers", "--pool", model.pool)),
    ]


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


def _tokens(answers: Sequence[Observed]) -> int:
    return sum(answer.completion_tokens for answer in answers)


def _through_s(answers: Sequence[Observed]) -> float:
    """From the start of the first batch to the last committed reply."""
    first_ms = min(answer.engine_started_at_ms for answer in answers)
    return (max(answer.replied_at_ms for answer in answers) - first_ms) / 1_000


def _batches(requests: Sequence[InferenceRequest], answers: Sequence[Observed]) -> list[list[EngineItem]]:
    """What ran together, in the order in which it ran."""
    by_start: dict[int, list[EngineItem]] = defaultdict(list)
    for request, answer in zip(requests, answers, strict=True):
        item = EngineItem(request.request_id, request.task, request.input, request.parameters)
        by_start[answer.engine_started_at_ms].append(item)
    return [batch for _, batch in sorted(by_start.items())]


def _direct_s(engine: Engine, batch: Sequence[EngineItem]) -> float:
    started = perf_counter()
    engine.run(batch, Outcomes())
    return perf_counter() - started
