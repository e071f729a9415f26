"""Evaluation runs through a whole pipeline: stored, resumed, scheduled, offline, and judged."""

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.demo_rollout.versions import BAD, CHAMPION, make_versions
from deploy.local.layout import PROJECT_ROOT
from deploy.local.services import Service
from deploy.models.digits_data import load_split
from fairlane import names
from fairlane.records import ModelRoute, ModelVersion, UsageEvent
from fairlane_server import cli
from fairlane_server.evaluation.run_store import EvaluationRuns
from tests.kit.pipeline import Pipeline
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(300)]

Run = Callable[..., tuple[int, Any, str]]
WAIT_S = 60.0
IMAGES = 150


class Bench:
    """A pipeline with a recorder, and commands of one of its tenants."""

    def __init__(
        self, pipeline: Pipeline, server: PostgresServer, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.pipeline = pipeline
        self.server = server
        self.tenant = pipeline.tenant("a")
        self._folder = folder
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> Any:
        """`fairlane evaluation`; what it prints, or complains about."""
        with pytest.raises(SystemExit) as caught:
            cli.main(["evaluation", *arguments, "--tenant", self.tenant, "--json"])
        shown = self._capsys.readouterr()
        assert caught.value.code == code, shown.err
        return json.loads(shown.out) if shown.out else shown.err

    def add(self, name: str, *rows: dict[str, Any]) -> None:
        file = self._folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        self.run("set", "add", name, str(file))

    def write(self, name: str, text: str) -> str:
        file = self._folder / name
        file.write_text(text)
        return str(file)


@pytest.fixture
def bench(
    broker: str,
    tmp_path: Path,
    unique: str,
    redis_url: str,
    migrated: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Bench]:
    env = {"POSTGRES_DSN": migrated.dispatcher_dsn}
    with Pipeline(broker, tmp_path, unique, tenants=("a",), redis_url=redis_url, env=env) as made:
        for name, value in made.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("POSTGRES_DSN", migrated.operator_dsn)
        yield Bench(made, migrated, tmp_path, capsys)


@pytest.fixture
def words(bench: Bench) -> Bench:
    """With the simulated engine, whose texts are of no use."""
    bench.pipeline.start()
    bench.pipeline.recorder(postgres_dsn=bench.server.recorder_dsn).wait_ready()
    return bench


def prompts(count: int, expected: str = ".+") -> list[dict[str, Any]]:
    return [{"id": f"e{number}", "input": {"prompt": f"p {number}"}, "expected": expected} for number in range(count)]


@pytest.mark.parametrize("priority", ["low", "backfill"])
def test_a_run_is_stored_and_compared(words: Bench, priority: str) -> None:
    model = words.pipeline.models[0].model
    words.add("easy", *prompts(6), *[one | {"id": f"hard-{one['id']}"} for one in prompts(2, "^never$")])
    found = words.run(
        *("run", "easy", "--model", model, "--against", f"{model}/1", "--scorer", "regex"),
        *("--max-tokens", "8", "--priority", priority),
    )
    assert [run["result"]["mean"] for run in found["runs"]] == [0.75, 0.75]
    assert (found["comparison"]["pairs"], found["comparison"]["difference"]) == (8, 0.0)
    first, second = found["runs"]
    assert first["result"]["versions"] == {"1": 8}
    assert first["result"]["completion_tokens"] > 0
    assert first["head"]["parameters"] == {"max_tokens": 8, "priority": priority}
    listed = words.run("list", "--model", model)["runs"]
    assert [one["run_id"] for one in listed] == [second["run_id"], first["run_id"]]
    shown = words.run("show", first["run_id"], "--examples")
    assert [one["value"] for one in shown["scores"]] == [1.0] * 6 + [0.0] * 2
    assert shown["scores"][6]["id"] == "hard-e0"
    assert "p 0" not in json.dumps(shown), "nothing of a text is stored with a score"
    compared = words.run("compare", first["run_id"], second["run_id"])
    assert compared["comparison"]["pairs"] == 8
    words.add("other", *prompts(1))
    other = words.run("run", "other", "--model", model, "--scorer", "regex")["runs"][0]
    assert "cannot be compared" in words.run("compare", first["run_id"], other["run_id"], code=1)
    written = names.backfill_topic(words.tenant) if priority == "backfill" else names.requests_topic(words.tenant)
    reader = words.pipeline.reader(written)
    reader.read_to_end()
    assert len(reader.records) >= 16


def test_ctrl_c_leaves_a_run_that_is_resumed(words: Bench) -> None:
    model = words.pipeline.models[0].model
    pool = words.pipeline.pool
    # Slow enough to be interrupted in the middle.
    words.pipeline.processes[f"consumer-{pool}-1"].kill()
    words.pipeline.consumer(2, {"SIMULATED_BATCH_MS": "200", "MAX_BATCH_SIZE": "2"}).wait_ready()
    words.pipeline.wait_all_own()
    words.add("long", *prompts(60))
    usage = words.pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
    options = ("--model", model, "--scorer", "regex", "--max-tokens", "4", "--json")
    arguments = ["evaluation", "run", "long", "--tenant", words.tenant, *options]
    code = f"from fairlane_server.cli import main; main({arguments!r})"
    with subprocess.Popen(
        (sys.executable, "-c", code), env=dict(os.environ), stdout=subprocess.PIPE, text=True
    ) as command:
        with EvaluationRuns(words.server.operator_dsn, words.tenant) as runs:
            eventually(lambda: any(run.stored for run in runs.list()), WAIT_S, "the first scores")
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=WAIT_S)
    assert command.returncode == 3
    (run_id,) = json.loads(out)["left"]
    resumed = words.run("resume", run_id)["runs"][0]
    assert (resumed["state"], resumed["stored"], resumed["result"]["mean"]) == ("finished", 60, 1.0)
    usage.read_to_end()
    ran = [event.request_id for event in words.pipeline.decoded(usage, UsageEvent)]
    assert len(ran) == len(set(ran)) == 60, "what was asked before is not run again"
    assert "it is finished" in words.run("resume", run_id, code=1)


def test_a_judge_without_verdicts_is_calibrated_and_refused(words: Bench) -> None:
    """The simulated engine writes no digits: its calibration says so."""
    model = words.pipeline.models[0].model
    rated = [one | {"output": "an answer", "rating": float(number % 2)} for number, one in enumerate(prompts(40))]
    words.add("rated", *rated)
    rubric = words.write("rubric.txt", "The answer is right.")
    made = words.run("judge", "calibrate", "rated", "--judge", model, "--rubric", rubric)["calibration"]
    assert made["judge_version"] == "1"
    assert made["agreement"]["refusal"] == "no verdict on 40 of 40 examples"
    judged = ("run", "rated", "--model", model, "--scorer", "judge", "--judge", model, "--rubric", rubric)
    assert "no verdict on 40 of 40 examples" in words.run(*judged, code=1)
    found = words.run(*judged, "--uncalibrated")["runs"][0]
    assert (found["result"]["mean"], found["result"]["not_scored"]) == (None, 40)
    assert found["result"]["judge_refusal"] == "no verdict on 40 of 40 examples"
    assert found["result"]["judge_tokens"] > 0
    assert (found["head"]["judge"]["calibration_id"], found["head"]["judge"]["rubric_digest"]) == (
        made["calibration_id"],
        made["rubric_digest"],
    )
    pairs = words.run(*judged, "--uncalibrated", "--pairwise", "--against", f"{model}/1")["runs"][0]
    assert pairs["result"]["not_scored"] == 40
    assert len(words.run("judge", "list")["calibrations"]) == 1


@pytest.fixture
def digits(bench: Bench, tmp_path: Path) -> Bench:
    """Two versions of the digit classifier on their real engine, the second one trained worse on purpose."""
    versions = make_versions(tmp_path / "digits")
    first = bench.pipeline.models[0]
    model, pool = f"{bench.pipeline.unique}-digits", first.pool
    made = [
        ModelVersion(model, version, pool, "torch-classifier", ("classify",), path, 1, 1)
        for version, path in ((CHAMPION, "digits"), (BAD, "digits-bad"))
    ]
    bench.pipeline.models = tuple(made)
    bench.pipeline.apply()
    bench.pipeline.dispatcher().wait_ready()
    arguments = ("-m", "inference_consumers", "--pool", pool)
    consumer = bench.pipeline.launch(Service(f"consumer-{pool}-1", arguments, {"MODELS_DIR": str(versions.models_dir)}))
    consumer.wait_ready(120)
    bench.pipeline.recorder(postgres_dsn=bench.server.recorder_dsn).wait_ready()
    bench.pipeline.wait_all_own()
    split = load_split()
    bench.add(
        "holdout",
        *(
            {"id": str(place), "input": {"image": base64.b64encode(image.tobytes()).decode()}, "expected": str(label)}
            for place, (image, label) in enumerate(
                zip(split.test_images[:IMAGES], split.test_labels[:IMAGES], strict=True)
            )
        ),
    )
    return bench


def test_the_champion_and_a_worse_candidate_are_measured_continuously(digits: Bench) -> None:
    model = digits.pipeline.models[0].model
    schedule = ("schedule", "set", model, "--set", "holdout", "--scorer", "accuracy", "--every-hours", "24")
    digits.run(*schedule)

    def due() -> list[Any]:
        runs: list[Any] = digits.run("due")["runs"]
        return runs

    eventually(lambda: digits.run("list")["runs"] or due(), WAIT_S, "the recorded route")
    (champion,) = digits.run("list")["runs"]
    assert champion["head"]["reference"] == f"{model}/{CHAMPION}"
    assert champion["result"]["mean"] > 0.9
    assert champion["fall"] is None
    assert digits.run("schedule", "list")["schedules"][0]["baseline_run"] == champion["run_id"]
    assert due() == [], "it is not due again"
    # A candidate is measured as soon as there is one, and falls below the baseline of the champion.
    route = digits.pipeline.control_models.read()[model]
    assert isinstance(route, ModelRoute)
    aliases = {**route.aliases, "candidate": BAD}
    digits.pipeline.control_models.publish([replace(route, revision=route.revision + 1, aliases=aliases)])
    found: list[Any] = []

    def is_measured() -> bool:
        found.extend(due())
        return bool(found)

    eventually(is_measured, WAIT_S, "the run of the candidate")
    (candidate,) = found
    assert candidate["head"]["reference"] == f"{model}/{BAD}"
    assert candidate["result"]["mean"] < champion["result"]["mean"]
    assert candidate["head"]["baseline_run"] == champion["run_id"]
    assert candidate["fall"]["is_fall"]
    # Another content of the set is another measure: the baseline is forgotten, and the champion makes a new one.
    digits.add("holdout", {"id": "one", "input": {"image": base64.b64encode(bytes(64)).decode()}, "expected": "0"})
    again = due()
    assert [one["head"]["reference"] for one in again] == [f"{model}/{CHAMPION}", f"{model}/{BAD}"]
    assert again[0]["head"]["baseline_run"] is None
    assert digits.run("schedule", "list")["schedules"][0]["baseline_run"] == again[0]["run_id"]
    assert again[1]["head"]["baseline_run"] == again[0]["run_id"]


def questions() -> list[dict[str, Any]]:
    """Sums with a right and a wrong answer each, as people would rate them."""
    rows = []
    for number in range(20):
        question, right = f"What is {number} + {number + 3}?", 2 * number + 3
        for name, answer, rating in (("right", right, 1.0), ("wrong", right + 7, 0.0)):
            row = {"id": f"{name}-{number}", "input": {"prompt": question}, "expected": str(right)}
            rows.append(row | {"output": f"It is {answer}.", "rating": rating})
    return rows


def test_the_language_model_that_ships_is_no_judge_and_its_calibration_says_so(bench: Bench) -> None:
    pipeline = bench.pipeline
    model, pool = f"{pipeline.unique}-smollm2", pipeline.pool
    path = "smollm2-135m-instruct"
    pipeline.models = (ModelVersion(model, "1", pool, "torch-causal-lm", ("generate",), path, 2_048, 64),)
    pipeline.apply()
    pipeline.dispatcher().wait_ready()
    models_dir = str(PROJECT_ROOT / ".fairlane" / "models")
    arguments = ("-m", "inference_consumers", "--pool", pool)
    consumer = pipeline.launch(Service(f"consumer-{pool}-1", arguments, {"MODELS_DIR": models_dir}))
    consumer.wait_ready(150)
    pipeline.recorder(postgres_dsn=bench.server.recorder_dsn).wait_ready()
    pipeline.wait_all_own()
    bench.add("rated", *questions())
    rubric = bench.write("rubric.txt", "The answer to the sum is right.")
    made = bench.run("judge", "calibrate", "rated", "--judge", model, "--rubric", rubric)["calibration"]
    agreement = made["agreement"]
    assert agreement["examples"] == 40
    judged = ("run", "rated", "--model", model, "--scorer", "judge", "--judge", model, "--rubric", rubric)
    complaint = bench.run(*judged, code=1)
    print(f"kappa of the language model that ships: {agreement}")  # noqa: T201 - shown with -s, or when it fails
    assert agreement["refusal"] is not None
    assert agreement["refusal"] in complaint
