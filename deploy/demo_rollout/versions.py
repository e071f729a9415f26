"""The models of the demo: three versions of the digit classifier, one of them worse on purpose, and two copies of the
language model, one in bfloat16 and one with weights of 8 bits."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.local.services import MODELS_FILE, TENANTS_FILE
from deploy.models.prepare import DEFAULT_MODELS_DIR
from deploy.models.train_digits import train

TENANT = "acme"
DIGITS = "digits"
CHAMPION, GOOD, BAD = "1", "2", "3"
LANGUAGE_MODEL = "smollm2-135m-instruct"
BFLOAT16, INT8 = "bf16", "int8"

_FOLDERS = {CHAMPION: "digits", GOOD: "digits-good", BAD: "digits-bad"}
_NUMBERS = {BFLOAT16: {"dtype": "bfloat16"}, INT8: {"quantization": "int8"}}
_GOOD_SEED, _BAD_EPOCHS = 21, 2


@dataclass(frozen=True, slots=True)
class Versions:
    """Where they are, and the accuracy of each classifier on images that none has seen in its training."""

    models_dir: Path
    models_file: Path
    tenants_file: Path
    accuracies: dict[str, float]


def make_versions(folder: Path) -> Versions:
    """Train what is not there yet, and write a models file of all, and a tenants file in which the tenant of the demo
    allows evaluation."""
    models_dir = folder / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    for prepared in (_FOLDERS[CHAMPION], LANGUAGE_MODEL):
        if not (models_dir / prepared).exists():
            (models_dir / prepared).symlink_to((DEFAULT_MODELS_DIR / prepared).resolve())
    _train(models_dir / _FOLDERS[GOOD], seed=_GOOD_SEED)
    _train(models_dir / _FOLDERS[BAD], seed=_GOOD_SEED, epochs=_BAD_EPOCHS, min_accuracy=0.0)
    digits, language_model = _entry(DIGITS), _entry(LANGUAGE_MODEL)
    del language_model["smaller_model"]
    entries = [
        *({**digits, **_aliases(version), "version": version, "path": path} for version, path in _FOLDERS.items()),
        *({**language_model, **_aliases(version), "version": version, **how} for version, how in _NUMBERS.items()),
    ]
    models_file = folder / "models.yaml"
    models_file.write_text(yaml.safe_dump({"models": entries}), encoding="utf-8")
    tenants = yaml.safe_load(TENANTS_FILE.read_text(encoding="utf-8"))
    for tenant in tenants["tenants"]:
        if tenant["tenant"] == TENANT:
            tenant["evaluation"] = "allowed"
    tenants_file = folder / "tenants.yaml"
    tenants_file.write_text(yaml.safe_dump(tenants), encoding="utf-8")
    accuracies = {one: _accuracy(models_dir / name) for one, name in _FOLDERS.items()}
    return Versions(models_dir, models_file, tenants_file, accuracies)


def _accuracy(folder: Path) -> float:
    return float(json.loads((folder / "model.json").read_text(encoding="utf-8"))["accuracy"])


def _train(folder: Path, **options: Any) -> None:
    # The description is written last.
    if not (folder / "model.json").exists():
        folder.mkdir(exist_ok=True)
        train(folder, **options)


def _aliases(version: str) -> dict[str, list[str]]:
    return {"aliases": ["champion"]} if version in (CHAMPION, BFLOAT16) else {}


def _entry(model: str) -> dict[str, Any]:
    """The model's entry in the file of the deployment."""
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    entry: dict[str, Any] = next(one for one in entries if one["model"] == model)
    return entry
