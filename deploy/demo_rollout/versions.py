"""Three versions of the digit classifier: the champion, one as good, and one that is worse on purpose."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.local.services import MODELS_FILE
from deploy.models.prepare import DEFAULT_MODELS_DIR
from deploy.models.train_digits import train

MODEL = "digits"
CHAMPION, GOOD, BAD = "1", "2", "3"
_FOLDERS = {CHAMPION: "digits", GOOD: "digits-good", BAD: "digits-bad"}
_GOOD_SEED, _BAD_EPOCHS = 21, 2


@dataclass(frozen=True, slots=True)
class Versions:
    """Where they are, and the accuracy of each on images that none has seen in its training."""

    models_dir: Path
    models_file: Path
    accuracies: dict[str, float]


def make_versions(folder: Path) -> Versions:
    """Train what is not there yet, and write a models file of the three."""
    models_dir = folder / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    champion = models_dir / _FOLDERS[CHAMPION]
    if not champion.exists():
        champion.symlink_to((DEFAULT_MODELS_DIR / _FOLDERS[CHAMPION]).resolve())
    _train(models_dir / _FOLDERS[GOOD], seed=_GOOD_SEED)
    _train(models_dir / _FOLDERS[BAD], seed=_GOOD_SEED, epochs=_BAD_EPOCHS, min_accuracy=0.0)
    models_file = folder / "models.yaml"
    models_file.write_text(yaml.safe_dump({"models": [_entry(version) for version in _FOLDERS]}), encoding="utf-8")
    return Versions(models_dir, models_file, {one: _accuracy(models_dir / name) for one, name in _FOLDERS.items()})


def _accuracy(folder: Path) -> float:
    return float(json.loads((folder / "model.json").read_text(encoding="utf-8"))["accuracy"])


def _train(folder: Path, **options: Any) -> None:
    # The description is written last.
    if not (folder / "model.json").exists():
        folder.mkdir(exist_ok=True)
        train(folder, **options)


def _entry(version: str) -> dict[str, Any]:
    entries = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    entry: dict[str, Any] = next(one for one in entries if one["model"] == MODEL)
    aliases = {"aliases": ["champion"]} if version == CHAMPION else {}
    return {**entry, "version": version, "path": _FOLDERS[version], **aliases}
