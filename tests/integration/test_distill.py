"""Distilling an encoder: the same bytes each time, and nothing of the machine in them."""

from pathlib import Path

import numpy as np
import pytest

from deploy.models.prepare import distill
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from tests.kit.encoder_kit import prepared_tokenizer, save_encoder

pytestmark = [pytest.mark.full, pytest.mark.model]


def test_it_makes_the_same_folder_each_time_which_a_static_embedder_reads(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    save_encoder(encoder, prepared_tokenizer())
    made = [tmp_path / name for name in ("first", "second")]
    for folder in made:
        folder.mkdir()
        distill(encoder, folder)
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in made)
    assert first.keys() == {"config.json", "model.safetensors", "modules.json", "tokenizer.json"}
    assert first == second
    assert not [name for name, content in first.items() if str(tmp_path).encode() in content]
    [vector, nothing] = StaticEmbedder(made[0]).embed(["A man is playing the guitar.", "\u2603"])
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert not nothing.any()
