"""The handwritten-digit classifier: a small convolutional network trained on scikit-learn's digits.

    python -m deploy.models.train_digits FOLDER

writes ``model.pt2`` (a torch.export program: float32 pixels in 0..1 of shape (batch, 1, 8, 8) to logits of
shape (batch, 10)) and ``model.json`` (labels, height, width, and the accuracy on the third of the images that
was held out of training).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from deploy.models.digits_data import SIZE, load_split

MIN_ACCURACY = 0.95
_SEED = 20
_EPOCHS = 40
_BATCH = 64


class AccuracyError(Exception):
    """The trained network is not good enough to be served."""


def train(folder: Path, *, min_accuracy: float = MIN_ACCURACY) -> float:
    """Train, check, save; the accuracy on the held-out third. Raises AccuracyError before it saves."""
    split = load_split()
    torch.manual_seed(_SEED)
    network = build_network()
    _fit(network, _tensor(split.train_images), torch.from_numpy(split.train_labels))
    network.eval()
    with torch.inference_mode():
        predicted = network(_tensor(split.test_images)).argmax(-1).numpy()
    accuracy = float((predicted == split.test_labels).mean())
    if accuracy < min_accuracy:
        raise AccuracyError(f"digits: accuracy {accuracy:.3f} on the held-out third, needed {min_accuracy:.3f}")
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


def _fit(network: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    network.train()
    for _ in range(_EPOCHS):
        for chosen in torch.chunk(torch.randperm(len(images)), -(-len(images) // _BATCH)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(images[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves Tensor.backward without types
            optimizer.step()


def _tensor(images: npt.NDArray[np.uint8]) -> torch.Tensor:
    return torch.from_numpy(images).unsqueeze(1).float() / 255


def main() -> int:
    """Command line; exit status 1 when the accuracy is not reached."""
    parser = argparse.ArgumentParser(prog="python -m deploy.models.train_digits", description="Train the digits.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        accuracy = train(folder)
    except AccuracyError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"digits: accuracy {accuracy:.3f} on the held-out third")
    return 0


if __name__ == "__main__":
    sys.exit(main())
