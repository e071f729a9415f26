"""A static embedder from an encoder: one vector per token, 256 numbers wide.

Tulkens and van Dongen 2024, "Model2Vec: Fast State-of-the-Art Static Embeddings": every token of the vocabulary goes
through the encoder alone, the vectors are reduced by principal components, and frequent tokens count less.
"""

import json
from pathlib import Path

DIMENSIONS = 256


def distill(encoder: Path, folder: Path) -> None:
    """Write the folder that ``StaticModel.from_pretrained`` reads, from a transformers folder. Nothing is fetched."""
    from model2vec.distill import distill_from_model
    from transformers import AutoModel, AutoTokenizer

    model = distill_from_model(
        AutoModel.from_pretrained(encoder, local_files_only=True),
        AutoTokenizer.from_pretrained(encoder, local_files_only=True),
        device="cpu",
        pca_dims=DIMENSIONS,
    )
    model.save_pretrained(folder)
    # The card shows nothing but defaults, and the configuration the path of this machine.
    (folder / "README.md").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_name"] = "all-minilm-l6-v2"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
