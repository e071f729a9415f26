"""Reads what tenants with budgets have spent, and the recorder's offsets with it, from Postgres."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from fairlane import names
from fairlane.backoff import Backoff
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane_server.budgets.budgets import KEY, USER, date_of, day_of, days_to, since
from fairlane_server.postgres.job_reservations import HOLDING, LEFT
from fairlane_server.postgres.pool import DeadlinePool, Question, rows_for
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.budgets.accounts import MOST_CALLERS, Spending
from stream_processors.dispatcher.budgets.ledger import BudgetLedger, SpendingBase

log = get_logger(__name__)

_TIMEOUT_S = 3.0
_BEHIND_AGAIN_S = 0.2
"""The recorder stores its offsets once a second."""

_IDLE_S = 0.5
_JOBS_EVERY_S = 5.0
_BACKOFF = Backoff(first_s=0.5, longest_s=5.0)
_OFFSET, _CALLER = "offset", "caller"

# One statement sees one snapshot: the recorder moves its offsets in the transaction that adds to the sums.
_OFFSETS_AND_SUMS = b"""
SELECT 'offset' AS kind, partition::text AS name, NULL::date AS day, next_offset::numeric AS amount
FROM source_offsets WHERE topic = %s
UNION ALL
SELECT 'tenant', NULL, day, sum(cost_nanos) FROM usage_daily
WHERE tenant = %s AND currency = %s AND day >= %s GROUP BY day
"""
# Of each caller two rows: today, and the other days of the month. Those that spent least share one amount.
_SUMS_OF_CALLERS = b"""
UNION ALL
SELECT 'caller', CASE WHEN place <= %s THEN requested_by ELSE '' END, part.day, sum(part.nanos) FROM (
    SELECT requested_by, sum(cost_nanos) AS nanos, coalesce(sum(cost_nanos) FILTER (WHERE day = %s), 0) AS of_today,
        row_number() OVER (ORDER BY sum(cost_nanos) DESC, requested_by) AS place
    FROM usage_daily_callers
    WHERE tenant = %s AND currency = %s AND day >= %s
        AND (starts_with(requested_by, %s) OR starts_with(requested_by, %s))
    GROUP BY requested_by
) AS callers, LATERAL (VALUES (%s::date, of_today), (%s::date, nanos - of_today)) AS part (day, nanos)
GROUP BY 2, 3
"""


_JOBS = f"""
SELECT reserved_for, sum({LEFT}) FROM backfill_jobs
WHERE tenant = %s AND reserved_currency = %s AND {HOLDING} GROUP BY reserved_for
""".encode()  # noqa: S608 - our own names


@dataclass(slots=True)
class SpendingLoader:
    """Loads the spending of every tenant of the ledger that is not known, and every few seconds what batch jobs have
    reserved; while Postgres is unavailable that stays as it was. Runs on the event loop."""

    ledger: BudgetLedger
    pool: DeadlinePool
    clock: ClockMs
    _failures: int = 0
    _jobs_at: float = 0.0

    async def run(self) -> None:
        """Load again and again, for ever."""
        while True:
            if monotonic() >= self._jobs_at:
                self._jobs_at = monotonic() + _JOBS_EVERY_S
                await self._load_jobs()
            await asyncio.sleep(await self._load_once())

    async def load_all(self, timeout_s: float) -> None:
        """Load until all spending is known, for at most ``timeout_s``."""
        give_up_at = monotonic() + timeout_s
        await self._load_jobs()
        while not self.ledger.is_loaded() and monotonic() < give_up_at:
            await asyncio.sleep(min(await self._load_once(), _BEHIND_AGAIN_S))

    async def _load_once(self) -> float:
        """Try each unknown tenant once. Returns after how many seconds to try again."""
        unknown = self.ledger.unknown()
        if not unknown:
            return _IDLE_S
        try:
            for wanted in unknown:
                tenant, base = wanted[0], base_of(await self._rows(*wanted))
                # The budgets may have changed meanwhile, and with them what is to be read.
                if self.ledger.wanted(tenant) == wanted and self.ledger.load(tenant, base, self.clock()):
                    log.info("spending_known", tenant=tenant)
        except (StoreError, TimeoutError) as error:
            self._failures += 1
            if self._failures & (self._failures - 1) == 0:
                log.warning("spending_unknown", tenants=len(unknown), reason=str(error), failures=self._failures)
            return _BACKOFF.delay_s(self._failures, 0.0)
        self._failures = 0
        return _BEHIND_AGAIN_S

    async def _load_jobs(self) -> None:
        for tenant, currency in self.ledger.tenants():
            try:
                (rows,) = await rows_for(self.pool, tenant, ((_JOBS, (tenant, currency)),), _TIMEOUT_S)
            except (StoreError, TimeoutError) as error:
                log.info("job_reservations_unknown", tenant=tenant, reason=str(error))
                return
            jobs: dict[str | None, int] = {name: int(nanos) for name, nanos in rows}
            jobs[None] = sum(jobs.values())
            self.ledger.promise(tenant, jobs, self.clock())

    async def _rows(self, tenant: str, currency: str, by_caller: bool) -> Iterable[tuple[Any, ...]]:
        question = question_of(tenant, currency, self.clock(), by_caller=by_caller)
        (rows,) = await rows_for(self.pool, tenant, (question,), _TIMEOUT_S)
        return rows


def question_of(tenant: str, currency: str, now_ms: int, *, by_caller: bool) -> Question:
    """The statement that reads the recorder's offsets, and a tenant's sums of the present month."""
    today, first = date_of(day_of(now_ms)), since(now_ms)
    parameters: tuple[Any, ...] = names.LEDGER_USAGE, tenant, currency, first
    if not by_caller:
        return _OFFSETS_AND_SUMS, parameters
    own = MOST_CALLERS, today, tenant, currency, first, KEY, USER, today, first
    return _OFFSETS_AND_SUMS + _SUMS_OF_CALLERS, (*parameters, *own)


def base_of(rows: Iterable[tuple[Any, ...]]) -> SpendingBase:
    """The answer to the statement."""
    offsets: dict[int, int] = {}
    spending: list[Spending] = []
    for kind, name, day, amount in rows:
        if kind == _OFFSET:
            offsets[int(name)] = int(amount)
        else:
            spending.append(Spending(name if kind == _CALLER else None, days_to(day), int(amount)))
    return SpendingBase(offsets, spending)
