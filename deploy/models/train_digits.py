"""The handwritten-digit classifier: a small convolutional network trained on scikit-learn's digits.

``train`` writes ``model.pt2`` (a torch.export program: float32 pixels in 0..1 of shape (batch, 1, 8, 8) to logits of
shape (batch, 10)) and ``model.json`` (labels, height, width, and the accuracy on the third of the images that
was held out of training).
"""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from deploy.models.digits_data import SIZE, load_split

MIN_ACCURACY = 0.95
SEED = 20
EPOCHS = 40
_BATCH = 64


def train(folder: Path, *, min_accuracy: float = MIN_ACCURACY, seed: int = SEED, epochs: int = EPOCHS) -> float:
    """Train, check, save; the accuracy on the held-out third. Raises ValueError before it saves if that is too low."""
    split = load_split()
    torch.manual_seed(seed)
    network = build_network()
    _fit(network, _tensor(split.train_images), torch.from_numpy(split.train_labels), epochs)
    network.eval()
    with torch.inference_mode():
        predicted = network(_tensor(split.test_images)).argmax(-1).numpy()
    accuracy = float((predicted == split.test_labels).mean())
    if accuracy < min_accuracy:
        raise ValueError(f"accuracy {accuracy:.3f} on the held-out third, needed {min_accuracy:.3f}")
    program = torch.export.export(
        network, (torch.zeros(2, 1, SIZE, SIZE),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, folder / "model.pt2")
    described = {
        "labels": [str(digit) for digit in range(10)],
        "height": SIZE,
        "width": SIZE,
        "accuracy": accuracy,
    }
    (folder / "model.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return accuracy


def build_network() -> nn.Module:
    """The untrained network, from float32 (batch, 1, 8, 8) to logits (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * (SIZE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _fit(network: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    network.train()
    for _ in range(epochs):
        for chosen in torch.chunk(torch.randperm(len(images)), -(-len(images) // _BATCH)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves Tensor.backward without types
            optimizer.step()


def _tensor(images: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(images).unsqueeze(1).float() / 255
