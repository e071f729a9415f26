"""What tenants had erased is not stored again, however often the log is read. Pure.

The log keeps the records until their retention ends; the table ``erased`` has a tombstone for each conversation and
each request that was erased. The replay of a dead letter has an id and a time of its own, and the text of before.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from stream_processors.recorder.projection import Projection
from stream_processors.recorder.tables import EVALUATION_RESULTS, FEEDBACK, RESULTS, TURNS, Table

CONVERSATION, REQUEST = "conversation", "request"
HISTORY = "history"
"""Kind of the tombstone of a conversation of which a turn was erased: later turns may repeat it. It keeps items out of
the labelling queue; results and turns are stored."""

OF_REQUESTS = (RESULTS, FEEDBACK, EVALUATION_RESULTS)
"""Tables with what may be erased with its request."""


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """A conversation or a request that may have been erased, by its name."""

    tenant: str
    kind: str
    name: str


def subjects(projection: Projection) -> list[Subject]:
    """All that the rows with texts are about, each once."""
    found = {Subject(tenant, CONVERSATION, name) for (tenant, _), name in projection.conversations.items()}
    for table in OF_REQUESTS:
        found |= {Subject(tenant, REQUEST, request_id) for tenant, request_id in requests_of(projection, table)}
    found |= {Subject(tenant, REQUEST, first_id) for (tenant, _), first_id in projection.replays.items()}
    return sorted(found)


def erased_with_conversation(projection: Projection, erased: Mapping[Subject, int]) -> list[tuple[str, str, str]]:
    """Requests with a result here that was erased with its conversation while it was under way: tenant, request and
    conversation. Who asks for one of them knows its id alone."""
    if not erased:
        return []
    place_of, found = _place_of(RESULTS), set()
    for layer in projection.layers.get(RESULTS.name, ()):
        for row in layer:
            tenant, request_id, *times = place_of(row)
            conversation = projection.conversations.get((tenant, request_id))
            if conversation is None or Subject(tenant, REQUEST, request_id) in erased:
                continue
            if _is_erased(projection, erased, tenant, request_id, *times):
                found.add((tenant, request_id, conversation))
    return sorted(found)


def drop_erased(projection: Projection, erased: Mapping[Subject, int]) -> int:
    """Take out the results, turns, feedback and copies of what was erased. Returns how many.

    Args:
        projection: rows of a batch.
        erased: what was erased, with the time before which a request of a conversation was submitted that it covers,
            since the epoch.
    """
    if not erased:
        return 0
    dropped = 0
    for table in (*OF_REQUESTS, TURNS):
        if (layers := projection.layers.get(table.name)) is None:
            continue
        place_of, kept = _place_of(table), []
        for layer in layers:
            rows = [row for row in layer if not _is_erased(projection, erased, *place_of(row))]
            dropped += len(layer) - len(rows)
            kept.append(rows)
        projection.layers[table.name] = [layer for layer in kept if layer]
    return dropped


def _place_of(table: Table) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Tenant, request, and the times of submission and reply of a row; of feedback, twice the only time: of a
    conversation, it is known by its request alone."""
    columns = list(table.columns)
    times = _ONLY_TIMES.get(table.name, ("submitted_at_ms", "replied_at_ms"))
    return itemgetter(*map(columns.index, ("tenant", "request_id", *times)))


_ONLY_TIMES = {FEEDBACK.name: ("given_at_ms",) * 2, EVALUATION_RESULTS.name: ("copied_at_ms", "finished_at_ms")}


def _is_erased(
    projection: Projection,
    erased: Mapping[Subject, int],
    tenant: str,
    request_id: str,
    submitted_at_ms: int | None,
    replied_at_ms: int,
) -> bool:
    # An id is of one request: the clocks of Postgres and the broker, which may differ, need not be compared.
    if Subject(tenant, REQUEST, request_id) in erased:
        return True
    first_id = projection.replays.get((tenant, request_id))
    if first_id is not None and Subject(tenant, REQUEST, first_id) in erased:
        return True
    if (conversation := projection.conversations.get((tenant, request_id))) is None:
        return False
    before_ms = erased.get(Subject(tenant, CONVERSATION, conversation))
    if before_ms is None or first_id is not None:
        # What a dead letter holds was said before it was sent again, nobody knows how long before.
        return before_ms is not None
    at_ms = replied_at_ms if submitted_at_ms is None else submitted_at_ms
    return at_ms < before_ms


def requests_of(projection: Projection, table: Table) -> Iterable[tuple[str, str]]:
    """Tenant and request of each row of a table that has both."""
    columns = list(table.columns)
    place_of = itemgetter(columns.index("tenant"), columns.index("request_id"))
    for layer in projection.layers.get(table.name, ()):
        yield from map(place_of, layer)
