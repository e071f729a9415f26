"""The head that finds prompt injections: a small network on the vectors of all-MiniLM-L6-v2.

``train`` writes ``head.safetensors`` (a hidden layer and an output) and ``head.json`` (the windows, the threshold, the
corpora with their licences, and the rates on the validation parts). The same machine and versions give the same bytes.

``python -m deploy.models.train_prompt_injection`` trains the head that ships, in two minutes.
"""

import importlib.metadata
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from torch import nn

from deploy.models.guardrail_models import ENCODER_PACKAGE, INJECTION_HEAD
from deploy.models.prepare import DEFAULT_MODELS_DIR
from deploy.models.prompt_injection_data import LabelledText, neuralchemy, prose, s_labs
from inference_consumers.engines.window_encoder import WindowEncoder
from inference_consumers.engines.windows import WindowSize
from inference_consumers.guardrails.prompt_injection import DESCRIPTION, WEIGHTS, InjectionHead

ENCODER = "all-minilm-l6-v2"
WINDOW = WindowSize(tokens=64, overlap=16)
"""The texts of the corpora have 15 to 30 tokens on average."""
FALSE_POSITIVE_RATE = 0.01
"""On the ordinary texts of the validation parts; it decides the threshold."""
LEAST_RECALL = 0.75
_LICENCES = {"s-labs": "MIT", "neuralchemy core, sources with an open licence": "Apache-2.0", "CPython": "PSF-2.0"}
_SEED = 20
_HIDDEN = 128
_EPOCHS = 20
_BATCH = 256
_MOST_CHARACTERS = 600
"""Of a text in training: some 2 windows. The rest of a long attack is often ordinary text."""
_PROSE = 1_500

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Windows: float32 (windows, width), and the text that each is of."""

    vectors: FloatArray
    texts: npt.NDArray[np.int64]
    are_attacks: BoolArray
    """Of texts."""

    def scores(self, head: InjectionHead) -> FloatArray:
        """Of each text the highest of its windows."""
        best = np.zeros(len(self.are_attacks), dtype=np.float32)
        np.maximum.at(best, self.texts, head.probabilities(self.vectors))
        return best


def train(
    encoder_folder: Path,
    folder: Path,
    training: Sequence[LabelledText] | None = None,
    validation: Sequence[LabelledText] | None = None,
    *,
    least_recall: float = LEAST_RECALL,
) -> InjectionHead:
    """Train, choose the threshold, check, save. Without texts, on the corpora that ship.

    Raises ValueError before it saves when the recall on the validation parts is below ``least_recall``.
    """
    if training is None or validation is None:
        training, validation = (
            _training_texts(),
            [*s_labs("validation"), *neuralchemy("validation"), *prose("validation")],
        )
    encoder = WindowEncoder(encoder_folder, WINDOW)
    network = _fit(*_encoded_for_training(encoder, training))
    held_out = _encoded(encoder, validation)
    threshold = _threshold(held_out, _head(network, threshold=1.0))
    head = _head(network, threshold)
    found = held_out.scores(head) >= threshold
    recall = float(found[held_out.are_attacks].mean())
    if recall < least_recall:
        raise ValueError(f"recall {recall:.3f} on the validation parts, needed {least_recall:.3f}")
    tensors = {
        "hidden_weights": head.hidden_weights,
        "hidden_biases": head.hidden_biases,
        "output_weights": head.output_weights,
        "output_bias": head.output_bias,
    }
    save_file(tensors, folder / WEIGHTS)
    described = {
        "encoder": ENCODER,
        "encoder_version": importlib.metadata.version(ENCODER_PACKAGE),
        "window_tokens": WINDOW.tokens,
        "overlap_tokens": WINDOW.overlap,
        "threshold": threshold,
        "validation_recall": round(recall, 4),
        "validation_false_positive_rate": round(float(found[~held_out.are_attacks].mean()), 4),
        "licences_of_the_corpora": _LICENCES,
    }
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return head


def _training_texts() -> list[LabelledText]:
    """The corpora, and ordinary prose."""
    choice = random.Random(_SEED)  # noqa: S311 - no secret
    return [*s_labs("train"), *neuralchemy("train"), *choice.sample(prose("train"), _PROSE)]


def _encoded(encoder: WindowEncoder, texts: Sequence[LabelledText], *, sentences: bool = True) -> _Encoded:
    windows, vectors = encoder.encode([one.text for one in texts], sentences=sentences)
    return _Encoded(vectors, np.array([window.text for window in windows]), np.array([one.is_attack for one in texts]))


def _encoded_for_training(encoder: WindowEncoder, texts: Sequence[LabelledText]) -> tuple[FloatArray, FloatArray]:
    """Vectors (windows, width) and labels (windows,). Sentences of attacks are left out: most sentences of a long one
    are ordinary."""
    cut = [LabelledText(one.text[:_MOST_CHARACTERS], one.is_attack) for one in texts]
    attacks = _encoded(encoder, [one for one in cut if one.is_attack], sentences=False)
    ordinary = _encoded(encoder, [one for one in cut if not one.is_attack])
    labels = np.repeat(np.array([1, 0], dtype=np.float32), [len(attacks.vectors), len(ordinary.vectors)])
    return np.concatenate([attacks.vectors, ordinary.vectors]), labels


def _fit(vectors: FloatArray, are_attacks: FloatArray) -> nn.Sequential:
    torch.manual_seed(_SEED)
    inputs, labels = torch.from_numpy(vectors), torch.from_numpy(are_attacks)
    network = nn.Sequential(nn.Linear(inputs.shape[1], _HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(_HIDDEN, 1))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    weight = (labels == 0).sum() / (labels == 1).sum()
    network.train()
    for _ in range(_EPOCHS):
        for chosen in torch.chunk(torch.randperm(len(inputs)), -(-len(inputs) // _BATCH)):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(
                network(inputs[chosen])[:, 0], labels[chosen], pos_weight=weight
            )
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves Tensor.backward without types
            optimizer.step()
    return network.eval()


def _head(network: nn.Sequential, threshold: float) -> InjectionHead:
    parameters = [parameter.detach().numpy() for parameter in network.parameters()]
    hidden_weights, hidden_biases, output_weights, output_bias = parameters
    return InjectionHead(hidden_weights, hidden_biases, output_weights[0], output_bias, WINDOW, threshold)


def _threshold(held_out: _Encoded, head: InjectionHead) -> float:
    """The lowest at which no more of the ordinary texts are found than FALSE_POSITIVE_RATE."""
    ordinary = np.sort(held_out.scores(head)[~held_out.are_attacks])[::-1]
    allowed = int(FALSE_POSITIVE_RATE * len(ordinary))
    return round(float(np.nextafter(ordinary[allowed], np.float32(2))) + 5e-5, 4)


if __name__ == "__main__":
    train(DEFAULT_MODELS_DIR / ENCODER, INJECTION_HEAD)
    print((INJECTION_HEAD / DESCRIPTION).read_text(encoding="utf-8"), end="")
