"""``python -m deploy.local.shared_packages ENVIRONMENT REQUIREMENTS``: fills a virtual environment from this one.

Every package that the requirements pin to the version installed here is put there by hard links, with all that torch
brings: the same gigabytes are then neither fetched nor stored twice. The two environments stay independent: pip
replaces files, it never writes into one.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement

_WITH_ITS_REQUIREMENTS = "torch"


def share(source: Path, target: Path, pins: Mapping[str, str]) -> list[str]:
    """Link packages from one folder of site-packages into another. Returns their names, normalized.

    ``pins`` are versions by normalized name. Programs are left out: their first line names their environment.
    """
    installed = {_normalized(found.name): found for found in distributions(path=[str(source)])}
    shared = {name for name, found in installed.items() if pins.get(name) == found.version.split("+")[0]}
    if _WITH_ITS_REQUIREMENTS in shared:
        shared.update(required_by(_WITH_ITS_REQUIREMENTS, installed, pins))
    for name in sorted(shared):
        for file in installed[name].files or ():
            if ".." not in file.parts:
                _link(source / file, target / file)
    return sorted(shared)


def read_pins(requirements: Path) -> dict[str, str]:
    """Versions by normalized name."""
    lines = (line.split("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {_normalized(name): version for name, version in pairs}


def required_by(root: str, installed: Mapping[str, Distribution], pins: Mapping[str, str]) -> Iterator[str]:
    """What a package needs here, and what that needs; without what is pinned, which is shared by its version or not."""
    left = [(root, frozenset[str]())]
    seen = set(left)
    while left:
        name, extras = left.pop()
        for line in installed[name].requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}
            )
            found = (_normalized(requirement.name), frozenset(requirement.extras))
            if wanted and found[0] in installed and found not in seen:
                seen.add(found)
                left.append(found)
                if found[0] not in pins:
                    yield found[0]


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        # Byte code that is listed by a package and was not compiled yet.
        return
    except OSError:
        # Another file system, or one without links.
        shutil.copy2(source, target)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Fill the environment that the command line names."""
    environment, requirements = Path(sys.argv[1]), Path(sys.argv[2])
    folder = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = share(Path(sys.prefix) / folder, environment / folder, read_pins(requirements))
    print(f"{len(shared)} packages shared with {sys.prefix}")


if __name__ == "__main__":
    main()
