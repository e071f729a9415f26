"""What tenants had erased is not stored again, however often the log is read. Pure.

The log keeps the records until their retention ends; the table ``erased`` has a tombstone for each conversation and
each request that was erased.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stream_processors.recorder.projection import Projection
from stream_processors.recorder.tables import RESULTS, TURNS

CONVERSATION, REQUEST = "conversation", "request"


@dataclass(frozen=True, slots=True, order=True)
class Subject:
    """A conversation or a request that may have been erased, by its name."""

    tenant: str
    kind: str
    name: str


def subjects(projection: Projection) -> list[Subject]:
    """All that the rows with texts are about, each once."""
    found = {Subject(tenant, CONVERSATION, name) for (tenant, _), name in projection.conversations.items()}
    found |= {Subject(tenant, REQUEST, request_id) for tenant, request_id in _requests(projection)}
    return sorted(found)


def drop_erased(projection: Projection, erased: Mapping[Subject, int]) -> int:
    """Take out the results and turns of what was erased. Returns how many.

    Args:
        projection: rows of a batch.
        erased: what was erased, with the time before which a request of a conversation was submitted that it covers,
            since the epoch.
    """
    if not erased:
        return 0
    dropped = 0
    for table in (RESULTS, TURNS):
        if (layers := projection.layers.get(table.name)) is None:
            continue
        columns = list(table.columns)
        places = [columns.index(name) for name in ("tenant", "request_id", "submitted_at_ms", "replied_at_ms")]
        kept = []
        for layer in layers:
            rows = [row for row in layer if not _is_erased(projection, erased, *(row[place] for place in places))]
            dropped += len(layer) - len(rows)
            kept.append(rows)
        projection.layers[table.name] = [layer for layer in kept if layer]
    return dropped


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
    if (conversation := projection.conversations.get((tenant, request_id))) is None:
        return False
    at_ms = replied_at_ms if submitted_at_ms is None else submitted_at_ms
    return at_ms < erased.get(Subject(tenant, CONVERSATION, conversation), 0)


def _requests(projection: Projection) -> Iterable[tuple[str, str]]:
    columns = list(RESULTS.columns)
    tenant, request_id = columns.index("tenant"), columns.index("request_id")
    for layer in projection.layers.get(RESULTS.name, ()):
        for row in layer:
            yield row[tenant], row[request_id]
