"""Model folders, and ways to damage them."""

import json
from pathlib import Path

WEIGHTS = "model.safetensors"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def edit(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")


def ask_for_a_terabyte(folder: Path) -> None:
    """A whole file as far as anybody can see: its content is a hole that takes no room on the disk."""
    numbers = 1 << 38
    header = {"model.norm.weight": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}
    encoded = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + 4 * numbers)
