"""What stands on a control topic, as far as it can be used."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from fairlane.logs import get_logger

log = get_logger(__name__)

SpecT = TypeVar("SpecT")


class LastGood(ABC, Generic[SpecT]):
    """Keeps the last good specification under a name whose new one cannot be used, and leaves out one that never was.

    The command line refuses such a file as a whole; a record that something else wrote must not stop a dispatcher. One
    thread.
    """

    unusable: ClassVar[str]
    """The log event of a specification that cannot be used."""

    def __init__(self) -> None:
        self._seen: Mapping[str, SpecT] | None = None
        self._usable: dict[str, SpecT] = {}

    def usable(self, specs: Mapping[str, SpecT]) -> Mapping[str, SpecT]:
        """The same object until the specifications change."""
        if specs is not self._seen:
            self._seen = specs
            found = {name: self._checked(name, spec) for name, spec in specs.items()}
            self._usable = {name: spec for name, spec in found.items() if spec is not None}
        return self._usable

    @abstractmethod
    def check(self, name: str, spec: SpecT) -> None:
        """Raises ValueError if the specification under this name cannot be used."""

    def _checked(self, name: str, spec: SpecT) -> SpecT | None:
        try:
            self.check(name, spec)
        except ValueError as error:
            log.error(self.unusable, name=name, reason=str(error), kept=name in self._usable)
            return self._usable.get(name)
        return spec
