"""Whose document is next. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WaitingUpload:
    """The oldest waiting upload of a tenant."""

    tenant: str
    upload_id: str


def next_uploads(
    waiting: Iterable[WaitingUpload], running: Iterable[str], last_turn: Mapping[str, int], lanes: int
) -> list[WaitingUpload]:
    """The uploads to start now: tenants in turn, the one first whose last turn is longest ago.

    Args:
        waiting: at most one of each tenant.
        running: the tenant of each running upload.
        last_turn: number of each tenant's last turn; higher is later.
        lanes: most uploads at a time; a tenant holds all but one, so that the next one waits for no tenant alone.
    """
    held = Counter(running)
    free = lanes - held.total()
    most_of_tenant = max(1, lanes - 1)
    able = [upload for upload in waiting if held[upload.tenant] < most_of_tenant]
    able.sort(key=lambda upload: (last_turn.get(upload.tenant, -1), upload.tenant))
    return able[: max(0, free)]
