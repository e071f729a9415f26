"""Pooling: a text's vector from the vectors of its tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference_consumers.engines.protocol import EngineLoadError

_MODES = ("mean", "cls")
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
# How sentence-transformers wrote the mode before it had one key for it: one flag for each.
_FLAG = "pooling_mode_"
_MODE_OF_FLAG = {"mean_tokens": "mean", "cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """``mode`` is mean (Reimers and Gurevych 2019, "Sentence-BERT", section 3) or cls, the first token's vector."""

    mode: str = "mean"
    normalize: bool = True

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """From last hidden states (rows, width, n) and the attention mask (rows, width) to float32 (rows, n), not yet
        normalized. Rows are padded on the right."""
        hidden = hidden.float()
        if self.mode == "cls":
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1)


def read_pooling(model: str, path: Path) -> Pooling | None:
    """Pooling from ``modules.json`` of a sentence-transformers folder; None without one.

    Raises EngineLoadError for a file that is damaged, and for a model that does more than pool and normalize.
    """
    file = path / "modules.json"
    if not file.is_file():
        return None
    try:
        modules = {module["type"].rpartition(".")[2]: module["path"] for module in _read(file)}
        _check(not (unknown := sorted(set(modules) - _MODULES)), f"this engine has no module {', '.join(unknown)}")
        _check("Pooling" in modules, "no module pools the vectors of the tokens")
        file = path / modules["Pooling"] / "config.json"
        return Pooling(_mode(_read(file)), normalize="Normalize" in modules)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineLoadError(f"{model}: {file} cannot be loaded: {error!r}") from error


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _mode(config: Mapping[str, Any]) -> str:
    if "pooling_mode" in config:
        stated = config["pooling_mode"]
        modes = [stated] if isinstance(stated, str) else stated
    else:
        modes = [key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value]
        modes = [_MODE_OF_FLAG.get(mode, mode) for mode in modes]
    _check(len(modes) == 1 and modes[0] in _MODES, f"this engine pools by {' or '.join(_MODES)}, not {modes}")
    return str(modes[0])


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
