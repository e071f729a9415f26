"""Check ``prompt_injection``: texts that give instructions against those of the system prompt.

A small head on the vectors of a sentence encoder, trained by ``deploy.models.train_prompt_injection``. It looks at
windows that overlap and at each sentence by itself, so that an attack within a long document is not averaged away.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from inference_consumers.engines.window_encoder import WindowEncoder
from inference_consumers.engines.windows import WindowSize
from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined

PROMPT_INJECTION = "prompt_injection"
WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class InjectionHead:
    """A hidden layer with ReLU, and a logistic output: float32 vectors (n, width) to probabilities (n,)."""

    hidden_weights: FloatArray
    """(hidden, width)"""
    hidden_biases: FloatArray
    output_weights: FloatArray
    """(hidden,)"""
    output_bias: FloatArray
    """(1,)"""
    size: WindowSize
    threshold: float

    @classmethod
    def load(cls, folder: Path) -> Self:
        """From WEIGHTS and DESCRIPTION. Raises OSError for a missing file, ValueError for one that does not fit."""
        try:
            described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
            size = WindowSize(int(described["window_tokens"]), int(described["overlap_tokens"]))
            return cls(**load_file(folder / WEIGHTS), size=size, threshold=float(described["threshold"]))
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{folder}: {error}") from error

    def probabilities(self, vectors: FloatArray) -> FloatArray:
        hidden = np.maximum(vectors @ self.hidden_weights.T + self.hidden_biases, 0)
        probabilities: FloatArray = 1 / (1 + np.exp(-(hidden @ self.output_weights + self.output_bias)))
        return probabilities


class PromptInjectionCheck:
    """A finding is a sentence or a window, or more that touch. The score is the highest probability."""

    name = PROMPT_INJECTION

    def __init__(self, encoder: WindowEncoder, head: InjectionHead) -> None:
        self._encoder = encoder
        self._head = head

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:  # noqa: ARG002 - of the protocol
        plain = [normalized(text) for text in texts]
        windows, vectors = self._encoder.encode([one.text for one in plain])
        found: list[list[Finding]] = [[] for _ in texts]
        for window, probability in zip(windows, self._head.probabilities(vectors).tolist(), strict=True):
            if probability >= self._head.threshold and window.start < window.end:
                hit = Finding(PROMPT_INJECTION, window.start, window.end, round(probability, 3))
                found[window.text].append(plain[window.text].original(hit))
        return [joined(hits) for hits in found]
