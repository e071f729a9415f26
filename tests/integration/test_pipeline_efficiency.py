"""pipeline-efficiency in a short version: that it measures both engines on real parts, not how good they are; and a
consumer with the vLLM engine, since it runs here anyhow."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from benchmarks import cluster, pipeline_efficiency
from benchmarks.load import LoadGenerator
from benchmarks.vllm_direct import DirectVllm, VllmMissingError
from deploy.local.services import MODELS_FILE, Service
from deploy.models.prepare import prepare, recipes
from fairlane.settings import Settings
from tests.kit.engine_kit import LANGUAGE_MODEL, save_tiny_model
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model]

MODELS_DIR = Path(".fairlane/models")
REQUESTS = 12
LOAD_S = 180.0

Measure = Callable[[int], dict[str, float]]


@pytest.fixture(scope="module", autouse=True)
def models() -> None:
    prepare(MODELS_DIR, recipes(), print)


def test_without_the_environment_of_vllm_nothing_is_measured_and_the_way_to_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SKIP_VLLM", raising=False)
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "python"))
    with pytest.raises(VllmMissingError, match=f"{tmp_path}/python is missing: run `make vllm`, or set SKIP_VLLM=1"):
        pipeline_efficiency.run()


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the shipped one: two layers of random weights, with its tokenizer and under its name."""
    tokenizer = AutoTokenizer.from_pretrained(LANGUAGE_MODEL, local_files_only=True)
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    [shipped] = [entry for entry in entries if entry["model"] == LANGUAGE_MODEL.name]
    save_tiny_model(tmp_path / "tiny", tokenizer, max_position_embeddings=shipped["limits"]["max_context_tokens"])
    models_file = tmp_path / "models.yaml"
    del shipped["smaller_model"]
    models_file.write_text(yaml.safe_dump({"models": [{**shipped, "path": "tiny"}]}), encoding="utf-8")
    monkeypatch.setattr(cluster, "MODELS_FILE", models_file)
    monkeypatch.setattr(cluster, "MODELS_DIR", tmp_path)
    monkeypatch.setenv("MODELS_DIR", str(tmp_path))


@pytest.mark.usefixtures("tiny_model")
def test_torch_is_held_against_itself_and_vllm_is_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def once(measure: Measure) -> tuple[dict[str, float], ...]:
        return (measure(0),)

    monkeypatch.setenv("SKIP_VLLM", "1")
    monkeypatch.setattr(pipeline_efficiency, "repeated", once)
    monkeypatch.setattr(pipeline_efficiency, "REQUESTS", REQUESTS)
    monkeypatch.setattr(pipeline_efficiency, "ANSWER_TOKENS", (6, 6))
    result = pipeline_efficiency.run()
    assert [figure.aim for figure in result.figures] == [0.92, None, None, None]
    assert all(figure.value > 0 for figure in result.figures)
    assert "SKIP_VLLM=1, vLLM is not measured" in capsys.readouterr().err


@dataclass(frozen=True)
class Bench:
    """A pipeline whose consumer has loaded vLLM, and vLLM alone."""

    pipeline: Pipeline
    consumer: ServiceProcess
    direct: DirectVllm


@pytest.fixture(scope="module")
def bench(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if os.environ.get("SKIP_VLLM") == "1":
        pytest.skip("SKIP_VLLM=1: vLLM is not tested")
    unique = unique_name()
    shipped = replace(cluster.shipped_model(), engine="vllm", smaller_model=None)
    model = replace(shipped, model=f"{unique}-words", pool=f"{unique}-pool")
    folder = tmp_path_factory.mktemp("vllm")
    with (
        Pipeline(broker, folder, unique, models=[model]) as pipeline,
        DirectVllm(Settings().vllm_python, model, MODELS_DIR) as direct,
    ):
        pipeline.dispatcher()
        consumer = pipeline.launch(Service("consumer-vllm", ("-m", "inference_consumers", "--pool", model.pool)))
        consumer.wait_ready(LOAD_S)
        direct.wait_loaded()
        pipeline.wait_all_own()
        yield Bench(pipeline, consumer, direct)


def test_vllm_is_held_against_itself(bench: Bench) -> None:
    [model] = bench.pipeline.models
    requests = pipeline_efficiency.requests_for(model, 0, (2, 8), REQUESTS)
    tenant = bench.pipeline.tenant("a")
    with LoadGenerator(bench.pipeline.settings, (tenant,)) as load:
        measured = pipeline_efficiency.measure_vllm(load, tenant, bench.direct, requests)
    assert measured.keys() == {"vllm_through_tokens_per_s", "vllm_direct_tokens_per_s", "vllm_ratio"}
    assert all(value > 0 for value in measured.values())

    consumer = bench.consumer
    assert consumer.metric("fairlane_computed_tokens_total", kind="useful") > 20 * REQUESTS
    assert consumer.metric("fairlane_computed_tokens_total", kind="padding") == 0


def test_metrics_of_vllm_are_among_the_consumers_with_few_labels(bench: Bench) -> None:
    [model] = bench.pipeline.models
    consumer = bench.consumer

    def shown() -> dict[str, set[str]]:
        """The values of each label in all samples of vLLM."""
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(consumer.get("/metrics")[1]):
            for sample in family.samples if family.name.startswith("vllm:") else ():
                for label, value in sample.labels.items():
                    found.setdefault(label, set()).add(value)
        return found

    eventually(lambda: consumer.metric("vllm:request_success_total") > REQUESTS, 15, "metrics of vLLM")
    labels = shown()
    assert labels["model_name"] == {model.model}
    assert labels["engine"] == {"0"}
    del labels["le"]  # the bounds of histograms
    assert max(map(len, labels.values())) < REQUESTS, "a label that may grow with the requests"
    assert consumer.metric("vllm:generation_tokens_total") > REQUESTS


def test_the_log_of_a_consumer_with_vllm_is_its_own(bench: Bench) -> None:
    lines = [line for line in bench.consumer.log().splitlines() if "Triton is installed" not in line]
    assert [line for line in lines if not line.startswith("{")] == []
    [ready] = bench.consumer.events("engine_ready")
    assert ready["engine"] == "vllm"
