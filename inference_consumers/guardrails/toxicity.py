"""Check ``toxicity``: insults, profanity and hate in English texts, by the linear model of alt-profanity-check.

Its folder holds plain numbers (``deploy.models.toxicity``), so that no pickle is loaded and scikit-learn is not needed.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from inference_consumers.engines.windows import SENTENCE_END
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined, pieces, shifted

TOXICITY = "toxicity"
THRESHOLD = 0.5
_PIECE_CHARACTERS = 300
"""Of a long sentence: the words of a longer piece would outweigh the one that matters."""
_OVERLAP_CHARACTERS = 60
_WORD = re.compile(r"\b\w\w+\b")
WEIGHTS, VOCABULARY = "toxicity.safetensors", "vocabulary.json"


class ToxicityModel:
    """Logistic regressions over tf-idf weights of words, and their mean.

    Args:
        folder: with WEIGHTS (``idf`` of shape (words,), ``weights`` (models, words), ``intercepts``, ``slopes`` and
            ``offsets`` (models,)) and VOCABULARY, the words in order.

    Raises:
        OSError: a file is missing.
        ValueError: the files do not fit one another.
    """

    def __init__(self, folder: Path) -> None:
        try:
            tensors = load_file(folder / WEIGHTS)
            self._idf, self._weights = tensors["idf"], tensors["weights"]
            self._intercepts, self._slopes, self._offsets = (
                tensors[name] for name in ("intercepts", "slopes", "offsets")
            )
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{folder / WEIGHTS}: {error}") from error
        words: list[str] = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
        if self._weights.shape[1] != len(words) or self._idf.shape != (len(words),):
            raise ValueError(f"{folder / VOCABULARY} has {len(words)} words, the weights {self._weights.shape[1]}")
        self._places = {word: place for place, word in enumerate(words)}

    def probability(self, text: str) -> float:
        """That the text is toxic."""
        counts = Counter(place for word in _WORD.findall(text.lower()) if (place := self._places.get(word)) is not None)
        places = np.fromiter(counts, dtype=np.int64, count=len(counts))
        values = np.fromiter(counts.values(), dtype=np.float64, count=len(counts)) * self._idf[places]
        length = math.sqrt(float(values @ values))
        margins = self._weights[:, places] @ (values / length if length else values) + self._intercepts
        return float(np.mean(1 / (1 + np.exp(self._slopes * margins + self._offsets))))


class ToxicityCheck:
    """A finding is a sentence, or a piece of a long one: the model does not say which word is toxic."""

    name = TOXICITY

    def __init__(self, model: ToxicityModel) -> None:
        self._model = model

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:  # noqa: ARG002 - of the protocol
        return [self._find(text) for text in texts]

    def _find(self, text: str) -> list[Finding]:
        plain = normalized(text)
        found = []
        ends = [match.end() for match in SENTENCE_END.finditer(plain.text)]
        for begin, end in pairwise((0, *ends, len(plain.text))):
            for start, piece in pieces(plain.text[begin:end], _PIECE_CHARACTERS, _OVERLAP_CHARACTERS):
                probability = self._model.probability(piece)
                if probability >= THRESHOLD and piece.strip():
                    hit = Finding(TOXICITY, 0, len(piece.rstrip()), round(probability, 3))
                    found.append(shifted(hit, begin + start))
        return joined(plain.original(one) for one in found)
