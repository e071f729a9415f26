"""Short-lived cache of collections, so that not every request asks Postgres for its collection's version."""

from collections import OrderedDict
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane_server.retrieval.store import Collection


@dataclass(slots=True)
class CollectionDirectory:
    """Remembers at most ``max_entries`` collections. Pure but for its clock, which must never go back.

    What one tenant asked for is never what another one is told: the tenant is half of every key. What is not there is
    not remembered: it may be there in a moment, and a tenant could fill the directory with names.

    Attributes:
        fresh_ms: how long a change may go unnoticed.
        known_ms: how long a collection counts as known while it cannot be looked up; what was deleted meanwhile may be
            used for as long.
    """

    clock: ClockMs
    fresh_ms: int = 1_000
    known_ms: int = 300_000
    max_entries: int = 4_096
    _known: OrderedDict[tuple[str, str], tuple[Collection, int]] = field(default_factory=OrderedDict)
    """With the time it was looked up."""

    def fresh(self, tenant: str, name: str) -> Collection | None:
        """As it is, but for what changed within ``fresh_ms``."""
        return self._younger(tenant, name, self.fresh_ms)

    def last_known(self, tenant: str, name: str) -> Collection | None:
        """As it was when it could be looked up last."""
        return self._younger(tenant, name, self.known_ms)

    def note(self, collection: Collection) -> None:
        """It was looked up just now."""
        key = collection.tenant, collection.name
        self._known[key] = collection, self.clock()
        self._known.move_to_end(key)
        if len(self._known) > self.max_entries:
            self._known.popitem(last=False)

    def forget(self, tenant: str, name: str) -> None:
        """It is not there, or not what it was."""
        self._known.pop((tenant, name), None)

    def _younger(self, tenant: str, name: str, age_ms: int) -> Collection | None:
        known = self._known.get((tenant, name))
        return known[0] if known is not None and self.clock() - known[1] < age_ms else None
