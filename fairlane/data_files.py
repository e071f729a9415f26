"""Location of the data files: beside the package in a checkout, inside it in an installed wheel."""

from importlib.resources import files
from pathlib import Path


def data_path(name: str) -> Path:
    """The path of a top-level data file or folder, e.g. ``schemas`` or ``topics.yaml``.

    Raises FileNotFoundError when the installation is incomplete.
    """
    package = Path(str(files("fairlane")))
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.exists():
            return candidate
    raise FileNotFoundError(f"{name}: neither in the package nor beside it; the installation is incomplete")
