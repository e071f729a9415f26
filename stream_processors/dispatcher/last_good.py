"""Last valid specification per name of a control topic."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

from fairlane.logs import get_logger

log = get_logger(__name__)

SpecT = TypeVar("SpecT")


class LastGood(ABC, Generic[SpecT]):
    """Keeps the last valid specification of a name whose new one is invalid, and omits a name that never had one.

    The command line rejects an invalid file as a whole, but a record written by another client must not stop a
    dispatcher. For one thread.
    """

    unusable: ClassVar[str]
    """The log event of an invalid specification."""

    def __init__(self) -> None:
        self._seen: Mapping[str, SpecT] | None = None
        self._usable: dict[str, SpecT] = {}

    def usable(self, specs: Mapping[str, SpecT]) -> Mapping[str, SpecT]:
        """The valid specifications by name; the same object until ``specs`` is another object."""
        if specs is not self._seen:
            self._seen = specs
            found = {name: self._checked(name, spec) for name, spec in specs.items()}
            self._usable = {name: spec for name, spec in found.items() if spec is not None}
        return self._usable

    @abstractmethod
    def check(self, name: str, spec: SpecT) -> None:
        """Raises ValueError if the specification under this name is invalid."""

    def _checked(self, name: str, spec: SpecT) -> SpecT | None:
        try:
            self.check(name, spec)
        except ValueError as error:
            log.error(self.unusable, name=name, reason=str(error), kept=name in self._usable)
            return self._usable.get(name)
        return spec
