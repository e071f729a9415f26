"""What a model's folder says of itself: its signature in MLflow's ``MLmodel``, its packages in ``requirements.txt``."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from fairlane_server.artifacts.digest import ArtifactError

_MOST_BYTES = 1 << 20
_MOST_REQUIREMENTS = 500
_LONGEST_REQUIREMENT = 300
_CONTINUED = re.compile(r"\\\r?\n")
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(://[^?#\s]*)\?[^#\s]*")
_SIGNATURE_PARTS = ("inputs", "outputs", "params")


@dataclass(frozen=True, slots=True)
class Description:
    """``signature`` is JSON; None when the folder has none."""

    signature: str | None = None
    requirements: tuple[str, ...] = ()


def described_by(folder: Path) -> Description:
    """Read the folder's own files; without them nothing is described. Raises ArtifactError for damaged ones."""
    return Description(_signature(folder / "MLmodel"), _requirements(folder / "requirements.txt"))


class _PlainLoader(yaml.SafeLoader):
    """Refuses merge keys (``<<``), which could multiply a small file. An alias is the same object once more."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        pass


def _signature(file: Path) -> str | None:
    text = _text(file)
    if text is None:
        return None
    try:
        found = _PlainLoader(text).get_single_data()
        signature = found.get("signature") if isinstance(found, dict) else None
        if not isinstance(signature, dict):
            return None
        # Each part is JSON in a string.
        parts = {name: json.loads(signature[name]) for name in _SIGNATURE_PARTS if signature.get(name)}
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        raise ArtifactError(f"{file.name} cannot be read as MLflow writes it") from None
    return json.dumps(parts, ensure_ascii=False, sort_keys=True)


def _requirements(file: Path) -> tuple[str, ...]:
    """Its packages. Options (other indexes, hashes) are left out, and users, passwords and queries of URLs: they may be
    credentials, and everybody who may list versions reads these lines."""
    text = _CONTINUED.sub(" ", _text(file) or "")
    lines = (line.partition(" --")[0].strip() for line in text.splitlines())
    packages = (_QUERY.sub(r"\1", _USER.sub("", line)) for line in lines if line and not line.startswith(("#", "-")))
    kept = list(dict.fromkeys(packages))
    if len(kept) > _MOST_REQUIREMENTS or any(len(line) > _LONGEST_REQUIREMENT for line in kept):
        raise ArtifactError(f"{file.name} has more than {_MOST_REQUIREMENTS} lines, or one that is too long")
    return tuple(kept)


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ArtifactError(f"{file.name} has more than {_MOST_BYTES} bytes")
        return content.decode()
    except (FileNotFoundError, IsADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{file.name} cannot be read: {type(error).__name__}") from None
