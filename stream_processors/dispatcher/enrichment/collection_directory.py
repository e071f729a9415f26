"""Short-lived cache of collections, so that not every request asks Postgres for its collection's version."""

from collections import OrderedDict
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane_server.retrieval.store import Collection


@dataclass(slots=True)
class CollectionDirectory:
    """Caches at most ``max_entries`` collections. Pure except for its monotonic clock.

    Keys contain the tenant: no tenant sees another's collection. Missing collections are not cached: one may be created
    at any moment, and a tenant could fill the directory with names.

    Attributes:
        fresh_ms: longest time a change may go unnoticed.
        known_ms: how long a collection counts as known while it cannot be looked up; a deleted one may be used as long.
    """

    clock: ClockMs
    fresh_ms: int = 1_000
    known_ms: int = 300_000
    max_entries: int = 4_096
    _known: OrderedDict[tuple[str, str], tuple[Collection, int]] = field(default_factory=OrderedDict)
    """With the time of its look-up."""

    def fresh(self, tenant: str, name: str) -> Collection | None:
        """The collection, as of at most ``fresh_ms`` ago."""
        return self._younger(tenant, name, self.fresh_ms)

    def last_known(self, tenant: str, name: str) -> Collection | None:
        """The collection as of its last look-up, at most ``known_ms`` ago."""
        return self._younger(tenant, name, self.known_ms)

    def note(self, collection: Collection) -> None:
        """Store a collection that was just looked up."""
        key = collection.tenant, collection.name
        self._known[key] = collection, self.clock()
        self._known.move_to_end(key)
        if len(self._known) > self.max_entries:
            self._known.popitem(last=False)

    def forget(self, tenant: str, name: str) -> None:
        """Remove a collection that is gone or was replaced."""
        self._known.pop((tenant, name), None)

    def _younger(self, tenant: str, name: str, age_ms: int) -> Collection | None:
        known = self._known.get((tenant, name))
        return known[0] if known is not None and self.clock() - known[1] < age_ms else None
