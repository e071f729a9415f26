"""Which waiting jobs run next; tenants share the slots. Pure.

Waiting tenants have the same number of slots, within one. Where slots cannot be divided evenly they rotate: a job
whose time slice is over continues later, and the tenant whose last turn began longest ago comes first. A job of ten
rows waits for some turns of other tenants, never for the end of a job of ten million.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_JOBS = 4
"""Default number of jobs that a process runs at a time."""

TURN_S = 60.0
"""Time slice: how long a job runs at least while tenants with fewer slots wait."""


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job without a runner. ``created_at_ms``: since the epoch; the oldest of a tenant comes first."""

    job_id: str
    tenant: str
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that this process runs; ``started_at_s`` is of a monotonic clock."""

    job_id: str
    tenant: str
    started_at_s: float
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class Turns:
    """Decision: jobs to start, and jobs to interrupt so that others can start."""

    start: tuple[WaitingJob, ...] = ()
    give_way: tuple[str, ...] = ()


def next_turns(
    waiting: Iterable[WaitingJob],
    running: Sequence[RunningJob],
    last_turn: Mapping[str, int],
    *,
    max_jobs: int,
    now_s: float,
    turn_s: float = TURN_S,
) -> Turns:
    """Share the slots.

    ``last_turn``: by tenant, sequence number of its last job that was started here (not a time: jobs may start
    together). A tenant without an entry never had a turn.
    """
    lines = _lines(waiting)
    stays = [job for job in running if not job.gives_way]
    held = Counter(job.tenant for job in stays)
    # The slot of a job that gives way is promised to the first in line, and is not requested twice.
    promised: list[WaitingJob] = []
    while lines and len(promised) < max_jobs - len(stays):
        promised.append(_take_first(lines, held, last_turn))
    start = tuple(promised[: max(0, max_jobs - len(running))])
    give_way: list[str] = []
    while lines:
        tenant = _first(lines, held, last_turn)
        leaver = _leaver(stays, held, held[tenant], now_s - turn_s)
        if leaver is None:
            break
        stays.remove(leaver)
        held[leaver.tenant] -= 1
        give_way.append(leaver.job_id)
        _take_first(lines, held, last_turn)
        # A tenant that has just lost a slot does not take another one in the same round.
        lines.pop(leaver.tenant, None)
    return Turns(start, tuple(give_way))


def _lines(waiting: Iterable[WaitingJob]) -> dict[str, deque[WaitingJob]]:
    """The jobs of each tenant, oldest first."""
    lines: dict[str, deque[WaitingJob]] = {}
    for job in sorted(waiting, key=lambda job: (job.created_at_ms, job.job_id)):
        lines.setdefault(job.tenant, deque()).append(job)
    return lines


def _first(lines: Mapping[str, deque[WaitingJob]], held: Counter[str], last_turn: Mapping[str, int]) -> str:
    """The tenant of the next slot."""

    def place(tenant: str) -> tuple[int, int, int, str]:
        oldest = lines[tenant][0]
        return held[tenant], last_turn.get(tenant, -1), oldest.created_at_ms, oldest.job_id

    return min(lines, key=place)


def _take_first(lines: dict[str, deque[WaitingJob]], held: Counter[str], last_turn: Mapping[str, int]) -> WaitingJob:
    tenant = _first(lines, held, last_turn)
    job = lines[tenant].popleft()
    if not lines[tenant]:
        del lines[tenant]
    held[tenant] += 1
    return job


def _leaver(stays: Sequence[RunningJob], held: Counter[str], has: int, turn_ended_s: float) -> RunningJob | None:
    """The job that makes room for a tenant with so many slots: the latest job of a tenant with two more, or with one
    more and an expired time slice."""
    ahead = [job for job in stays if held[job.tenant] >= has + 2]
    if ahead:
        return max(ahead, key=lambda job: (held[job.tenant], job.started_at_s, job.job_id))
    had_its_time = [job for job in stays if held[job.tenant] == has + 1 and job.started_at_s <= turn_ended_s]
    return min(had_its_time, key=lambda job: (job.started_at_s, job.job_id), default=None)
