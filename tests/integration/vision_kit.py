"""Folders of image classifiers, as they come."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn

from inference_consumers.engines.vision_programs import TORCHSCRIPT


def save_script(folder: Path, network: nn.Module, labels: int, *, side: int = 8) -> None:
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(network.eval()), folder / TORCHSCRIPT.file)
    describe(folder, [str(label) for label in range(labels)], side)


def describe(folder: Path, labels: list[str], side: object = 8) -> None:
    described = {"labels": labels, "height": side, "width": side}
    (folder / "model.json").write_text(json.dumps(described), encoding="utf-8")
