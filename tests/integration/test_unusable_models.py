"""A consumer whose model cannot be used: it says so in one line, with the file, and ends; it joins no group before."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.services import Service
from fairlane.outcomes import Outcome
from fairlane.records import ModelRoute
from tests.kit.damaged_models import WEIGHTS, ask_for_a_terabyte, edit, truncate
from tests.kit.encoder_kit import prepared_tokenizer, save_encoder
from tests.kit.model_kit import DIGITS, real_models, save_models
from tests.kit.pipeline import Pipeline, unique_name

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model]

Damage = Callable[[Path], object]
LAUNCH_S = 120.0
"""Far more than it takes: torch is imported by as many processes as there are tests at work."""


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """No process; a pool for each model."""
    folder, unique = tmp_path_factory.mktemp("unusable"), unique_name()
    save_models(folder / "models")
    models = [replace(model, pool=f"{unique}-{model.path}") for model in real_models(unique, unique)]
    with Pipeline(broker, folder, unique, tenants=("a",), models=models) as pipeline:
        yield pipeline


def noise(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(bytes(range(256)))


def another_architecture(folder: Path) -> None:
    shutil.rmtree(folder)
    save_encoder(folder, prepared_tokenizer())


def a_terabyte(folder: Path) -> None:
    """A hole that takes no room on the disk."""
    with (folder / "model.pt2").open("wb") as file:
        file.truncate(1 << 40)


NO_MEMORY = "the weights need 1024.00 GiB of memory; this machine has "
CASES: tuple[tuple[str, str, Damage, str], ...] = (
    ("no folder", "words", shutil.rmtree, " holds no model (there is no such folder)"),
    ("half of the weights", "words", lambda f: truncate(f / WEIGHTS), f"/{WEIGHTS} cannot be loaded: "),
    ("a size that is no number", "words", lambda f: edit(f, hidden_size="many"), "/config.json cannot be loaded: "),
    ("an unknown architecture", "words", lambda f: edit(f, model_type="homemade"), "/config.json cannot be loaded: "),
    ("a tokenizer of noise", "words", noise, "/tokenizer.json cannot be loaded: "),
    ("more than there is memory for", "words", ask_for_a_terabyte, f": {NO_MEMORY}"),
    ("another architecture", "pairs", another_architecture, "/config.json describes BertModel; needed is Bert"),
    ("half of a program", DIGITS, lambda f: truncate(f / "model.pt2"), "/model.pt2 cannot be loaded: "),
    ("a program without end", DIGITS, a_terabyte, f"/model.pt2: {NO_MEMORY}"),
)


@pytest.mark.parametrize(("name", "damage", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_is_said_in_one_line_and_that_is_all(
    pipeline: Pipeline, tmp_path: Path, name: str, damage: Damage, said: str
) -> None:
    shutil.copytree(pipeline.folder / "models" / name, tmp_path / name)
    damage(tmp_path / name)
    (model,) = (model for model in pipeline.models if model.path == name)
    env = {"MODELS_DIR": str(tmp_path), "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    arguments = ("-m", "inference_consumers", "--pool", model.pool)
    consumer = pipeline.launch(Service(f"unusable-{tmp_path.name}", arguments, env))
    assert consumer.wait_ended(LAUNCH_S) == 1

    log = consumer.log()
    plain = [line for line in log.splitlines() if not line.startswith(("{", "%"))]
    assert len(plain) == 1, log
    assert plain[0].startswith(f"inference_consumers: {model.model}: {tmp_path / name}"), plain
    assert said in plain[0]
    assert [entry["reason"] for entry in consumer.events("engine_unusable")] == [plain[0].partition(": ")[2]]
    assert not consumer.events("engine_died")
    assert pipeline.assignments(pipeline.pool_group(model.pool)) == {}


def test_a_new_version_that_cannot_be_loaded_gets_no_work_and_the_one_before_serves(
    pipeline: Pipeline, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(pipeline.apply)
    (words,) = (model for model in pipeline.models if model.path == "words")
    broken = replace(words, version="next", path="none")
    route = ModelRoute(words.model, 1, {"champion": broken.version}, {"champion": words.version})
    pipeline.control_models.publish([broken, route])
    env = {"MODELS_DIR": str(pipeline.folder / "models"), "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    consumer = pipeline.launch(Service("consumer-beside", ("-m", "inference_consumers", "--pool", words.pool), env))
    pipeline.dispatcher().wait_ready()
    consumer.wait_ready(LAUNCH_S)
    assert [entry["version"] for entry in consumer.events("engine_unusable")] == ["next"]
    assert consumer.metric("fairlane_versions_missing", state="failed") == 1
    pipeline.wait_all_own()
    asked = pipeline.request(model=words.model)
    pipeline.publish("a", asked)
    reply = pipeline.replies("a").wait([asked.request_id])[asked.request_id]
    assert (reply.outcome, reply.model_version) == (Outcome.OK, words.version)
