"""Published specifications, of which an invalid one does not replace the valid one before."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from fairlane.logs import get_logger

log = get_logger(__name__)

SpecT = TypeVar("SpecT")


class LastGood(Generic[SpecT]):
    """Keeps the last valid specification of a name whose new one is invalid, and omits a name that never had one.

    The command line rejects an invalid file as a whole, but a record written by another client must not stop a
    service. For one thread.

    Args:
        check: raises ValueError if the specification under this name is invalid.
        unusable: the log event of an invalid specification.
    """

    def __init__(self, check: Callable[[str, SpecT], None], unusable: str) -> None:
        self._check = check
        self._unusable = unusable
        self._seen: Mapping[str, SpecT] | None = None
        self._usable: dict[str, SpecT] = {}

    def usable(self, specs: Mapping[str, SpecT]) -> Mapping[str, SpecT]:
        """The valid specifications by name; the same object until ``specs`` is another object."""
        if specs is not self._seen:
            self._seen, before, self._usable = specs, self._usable, {}
            for name, spec in specs.items():
                try:
                    self._check(name, spec)
                except ValueError as error:
                    log.error(self._unusable, name=name, reason=str(error), kept=name in before)
                    if name in before:
                        self._usable[name] = before[name]
                else:
                    self._usable[name] = spec
        return self._usable
