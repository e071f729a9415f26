"""Port of a registry whose new versions are followed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RegistryVersion:
    """A version of a registered model as the registry lists it. ``is_ready``: its files are complete."""

    name: str
    version: str
    is_ready: bool

    @property
    def reference(self) -> str:
        """As a source of artifacts names it."""
        return f"models:/{self.name}/{self.version}"


class Registry(Protocol):
    """What lists the versions of a registered model."""

    def versions(self, name: str) -> Sequence[RegistryVersion]:
        """In the order of their numbers. Raises ArtifactError."""
