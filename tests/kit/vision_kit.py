"""Folders of image classifiers, as they come."""

import json
import warnings
from pathlib import Path

import torch
from torch import nn

from inference_consumers.engines.classifier import EXPORTED, TORCHSCRIPT


def save_script(folder: Path, network: nn.Module, labels: int, *, side: int = 8) -> None:
    folder.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(network.eval()), folder / TORCHSCRIPT.file)
    describe(folder, [str(label) for label in range(labels)], side)


def save_exported(folder: Path, network: nn.Module, labels: list[str], *, channels: int = 1, side: int = 8) -> None:
    """A program for batches of any size."""
    folder.mkdir(exist_ok=True)
    example = torch.zeros(2, channels, side, side)
    program = torch.export.export(network.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, folder / EXPORTED.file)
    describe(folder, labels, side, channels)


def describe(folder: Path, labels: list[str], side: object = 8, channels: object = None) -> None:
    described = {"labels": labels, "height": side, "width": side}
    if channels is not None:
        described["channels"] = channels
    (folder / "model.json").write_text(json.dumps(described), encoding="utf-8")
