"""The static embedder by itself: from any thread, in no time, and from a folder that is whole."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from deploy.models.prepare import MANIFEST, prepare, recipes
from fairlane_server.retrieval.embedder import EmbedderError
from fairlane_server.retrieval.static_embedder import MOST_CHARACTERS, StaticEmbedder
from tests.kit.encoder_kit import MODELS_DIR, PROJECT

pytestmark = [pytest.mark.full, pytest.mark.model]

FOLDER = MODELS_DIR / "all-minilm-l6-v2-static"


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare(MODELS_DIR, recipes(), print)


@pytest.fixture(scope="module")
def embedder() -> StaticEmbedder:
    return StaticEmbedder(FOLDER)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / FOLDER.name
    shutil.copytree(FOLDER, folder)
    return folder


def test_any_number_of_threads_may_use_it(embedder: StaticEmbedder) -> None:
    texts = [f"text {number} of {'many ' * (number % 50)}" for number in range(500)]
    expected = embedder.embed(texts)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                assert np.array_equal(embedder.embed(texts), expected)
                assert np.allclose(asyncio.run(embedder.embed_query(texts[7])), expected[7])
        except BaseException as error:  # noqa: BLE001 - told by the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []


def test_a_query_costs_an_event_loop_next_to_nothing(embedder: StaticEmbedder) -> None:
    async def ask(text: str, times: int) -> float:
        started = process_time()
        for _ in range(times):
            await embedder.embed_query(text)
        return (process_time() - started) / times

    assert asyncio.run(ask("How do I write a tuple with just one element?", 500)) < 0.001
    assert asyncio.run(ask("long " * 200_000, 3)) < 0.1


def test_what_is_far_behind_in_a_text_does_not_count(embedder: StaticEmbedder) -> None:
    start = ("word " * MOST_CHARACTERS)[:MOST_CHARACTERS]
    first, second, other = embedder.embed([start, start + "guitar " * 100, "guitar " + start])
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_it_is_named_after_what_it_was_made_from(embedder: StaticEmbedder, copied: Path) -> None:
    assert embedder.name.startswith("all-minilm-l6-v2-static:")
    assert StaticEmbedder(copied).name == embedder.name
    manifest = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps({**manifest, "files": {}}))
    assert StaticEmbedder(copied).name == embedder.name
    (copied / MANIFEST).write_text(json.dumps({**manifest, "revision": manifest["revision"] + 1}))
    assert StaticEmbedder(copied).name != embedder.name


def test_a_folder_without_a_manifest_is_named_after_its_weights(copied: Path) -> None:
    (copied / MANIFEST).unlink()
    name = StaticEmbedder(copied).name
    assert StaticEmbedder(copied).name == name
    weights = load_file(copied / "model.safetensors")
    save_file({"embeddings": weights["embeddings"] * 2}, copied / "model.safetensors")
    assert StaticEmbedder(copied).name != name


def test_weights_and_a_shared_table_are_taken_into_account(embedder: StaticEmbedder, copied: Path) -> None:
    table = load_file(copied / "model.safetensors")["embeddings"]
    swapped = table[::-1].copy() * 2
    mapping = np.arange(len(table))[::-1].copy()
    weights = np.full(len(table), 0.5, np.float32)
    save_file({"embeddings": swapped, "mapping": mapping, "weights": weights}, copied / "model.safetensors")
    texts = ["A man is playing the guitar.", "Interest rates rose again."]
    assert StaticEmbedder(copied).embed(texts) == pytest.approx(embedder.embed(texts), abs=1e-3)


def _with_nan(folder: Path) -> None:
    table = load_file(folder / "model.safetensors")["embeddings"]
    table[100, 3] = np.nan
    save_file({"embeddings": table}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "no static embedder is there"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no static embedder is there"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded"),
        (_with_nan, "numbers that are not finite"),
    ],
)
def test_a_damaged_folder_is_one_line_that_names_it(
    copied: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(copied)
    with pytest.raises(EmbedderError, match=message) as caught:
        StaticEmbedder(copied)
    assert str(caught.value).startswith(f"{copied}: ")


def test_a_process_that_embeds_imports_no_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from fairlane.settings import Settings;"
        "from fairlane_server.retrieval.embedders import embedder_for;"
        "assert not {'httpx', 'model2vec'} & sys.modules.keys();"
        "embedder_for(Settings()).embed(['text']);"
        "assert not {'torch', 'transformers', 'sklearn', 'confluent_kafka'} & sys.modules.keys(), sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=PROJECT,
        env={**os.environ, "MODELS_DIR": str(MODELS_DIR), "RETRIEVAL_EMBEDDER": "static"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
