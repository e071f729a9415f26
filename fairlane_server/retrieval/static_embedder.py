"""Static embedder: token vectors from a table, microseconds per text, so it may run in an event loop.

The table is a model2vec folder (Tulkens and van Dongen 2024, "Model2Vec: Fast State-of-the-Art Static Embeddings"): the
vector of a text is the mean of its tokens' vectors, scaled to length 1.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairlane_server.retrieval.embedder import EmbedderError, FloatArray
from fairlane_server.text import clean_text

MOST_CHARACTERS = 8_000
"""What a text holds beyond this is not looked at: it would keep an event loop for milliseconds."""

_MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
_TEXTS_AT_A_TIME = 1_024


class StaticEmbedder:
    """Both an embedder and a query embedder. Any thread may use it.

    Only the table and the tokenizer are the library's: its own ``encode`` sets the tokenizer up anew with every call,
    averages in the table's 16 bits, and takes more than twice as long for a query.
    """

    def __init__(self, path: Path) -> None:
        """Load the folder. Raises EmbedderError when there is none, or it is damaged."""
        # The library would look for a folder that is not there on the internet.
        if not (path / WEIGHTS).is_file():
            raise EmbedderError(f"{path}: no static embedder is there; `python -m deploy.models.prepare` makes one")
        try:
            from model2vec import StaticModel

            model = StaticModel.from_pretrained(path)
        except Exception as error:
            # Of safetensors, of tokenizers and of JSON: each has errors of its own.
            raise EmbedderError(f"{path}: cannot be loaded: {' '.join(str(error).split())}") from error
        table = model.embedding.astype(np.float32)
        if model.token_mapping is not None:
            table = table[model.token_mapping]
        if model.weights is not None:
            table *= model.weights.astype(np.float32)[:, None]
        if not np.isfinite(table).all():
            raise EmbedderError(f"{path}: cannot be loaded: numbers that are not finite")
        self._table: FloatArray = table
        self._tokenizer = model.tokenizer
        self._tokenizer.no_truncation()
        self._unknown: int | None = model.unk_token_id
        self.name = f"{path.name}:{_digest(path)}"
        self.dimensions = int(table.shape[1])

    def embed(self, texts: Sequence[str]) -> FloatArray:
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            some = [clean_text(text[:MOST_CHARACTERS]) for text in texts[start : start + _TEXTS_AT_A_TIME]]
            for index, encoded in enumerate(self._tokenizer.encode_batch_fast(some, add_special_tokens=False)):
                self._average(encoded.ids, vectors[start + index])
        return vectors

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, whatever its length."""
        cleaned = [clean_text(text) for text in texts]
        return [len(encoded.ids) for encoded in self._tokenizer.encode_batch_fast(cleaned, add_special_tokens=False)]

    async def embed_query(self, text: str) -> FloatArray:
        """See QueryEmbedder. It never waits."""
        vector = np.zeros(self.dimensions, dtype=np.float32)
        cleaned = clean_text(text[:MOST_CHARACTERS])
        self._average(self._tokenizer.encode(cleaned, add_special_tokens=False).ids, vector)
        return vector

    def close(self) -> None:
        """Do nothing: no connection is open."""

    async def aclose(self) -> None:
        """Do nothing: no connection is open."""

    def _average(self, token_ids: list[int], vector: FloatArray) -> None:
        if self._unknown in token_ids:
            token_ids = [token_id for token_id in token_ids if token_id != self._unknown]
        if not token_ids:
            return
        mean = self._table[token_ids].mean(axis=0)
        length = float(np.sqrt(mean @ mean))
        if length > 0:
            np.divide(mean, length, out=vector)


def _digest(path: Path) -> str:
    """Of what the folder was made from, where its manifest says so: processors differ in the last bits of what they
    make of the same, and vectors can be compared all the same. Of the weights for any other folder."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        made_from = json.dumps({**manifest, "files": None}, sort_keys=True).encode()
    except (OSError, ValueError, TypeError):
        made_from = (path / WEIGHTS).read_bytes()
    return hashlib.sha256(made_from).hexdigest()[:8]
