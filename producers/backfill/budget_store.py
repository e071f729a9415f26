"""Reserves jobs in the budgets of their tenants: specification and prices from Kafka, the rest in Postgres."""

from contextlib import closing

from fairlane.codec import Codec
from fairlane.names import CONTROL_PRICES
from fairlane.records import ModelPrices, TenantSpec
from fairlane.settings import Settings
from fairlane_server.budgets.budgets import days_to, since
from fairlane_server.control.published_tenants import tenant_topic
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.costs.price_book import PriceBook, usable_prices
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.postgres.job_reservations import HOLDING, LEFT
from producers.backfill.budgets import Spent, job_nanos, left_nanos, too_expensive
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.inputs import RowSource
from producers.backfill.job import InputPosition, Job
from producers.backfill.job_store import Database
from producers.backfill.rows import parse_row

_SAMPLE_ROWS = 1_000
_SAMPLE_BYTES = 8 * 1024 * 1024

# Jobs of one tenant that start at the same time see one another's reservations.
_ALONE = b"SELECT pg_advisory_xact_lock(hashtextextended('fairlane budgets of ' || %s, 0))"
_SPENT = b"""
SELECT NULL, day, sum(cost_nanos) FROM usage_daily WHERE tenant = %(tenant)s AND currency = %(currency)s
    AND day >= %(since)s GROUP BY day
UNION ALL
SELECT requested_by, day, sum(cost_nanos) FROM usage_daily_callers WHERE tenant = %(tenant)s
    AND currency = %(currency)s AND day >= %(since)s AND requested_by = %(caller)s GROUP BY 1, 2
"""
_RESERVED = f"""
SELECT reserved_for, {LEFT} FROM backfill_jobs
WHERE tenant = %(tenant)s AND job_id <> %(job_id)s AND reserved_currency = %(currency)s AND {HOLDING}
""".encode()  # noqa: S608 - our own names
_RESERVE = b"""
UPDATE backfill_jobs SET reserved_nanos = %(nanos)s, reserved_currency = %(currency)s, reserved_for = %(caller)s
WHERE job_id = %(job_id)s AND token = %(token)s
"""
_NOTHING = "UPDATE backfill_jobs SET reserved_nanos = 0 WHERE job_id = %s AND token = %s"


class JobBudgets(Database):
    """The budgets of one tenant."""

    def reserve_nothing(self, job: Job) -> None:
        """Record that the job needs no budget. Raises LeaseLostError, UnavailableError."""
        if self._execute(_NOTHING, (job.job_id, job.token)) == 0:
            raise LeaseLostError

    def reserve(self, job: Job, spec: TenantSpec, nanos: int, now_ms: int) -> None:
        """Reserve a job that costs ``nanos`` as a whole. Raises JobFailedError if its rows without a result do not fit,
        LeaseLostError, UnavailableError."""
        currency, caller = spec.budgets[0].currency, job.spec.requested_by
        values = {
            "tenant": job.tenant,
            "job_id": job.job_id,
            "token": job.token,
            "currency": currency,
            "caller": caller,
            "nanos": nanos,
            "since": since(now_ms),
        }
        with self._transaction() as connection:
            connection.execute(_ALONE, (job.tenant,))
            rows = connection.execute(_SPENT, values).fetchall()
            spent = [Spent(name, days_to(day), int(amount)) for name, day, amount in rows]
            for name, amount in connection.execute(_RESERVED, values):
                spent.append(Spent(None, None, int(amount)))
                if name is not None:
                    spent.append(Spent(name, None, int(amount)))
            if (reason := too_expensive(spec, caller, left_nanos(job, nanos), spent, now_ms)) is not None:
                raise JobFailedError(reason)
            if connection.execute(_RESERVE, values).rowcount == 0:
                raise LeaseLostError


def reserve_job(settings: Settings, codec: Codec, job: Job, source: RowSource, now_ms: int) -> None:
    """Reserve a job that begins, or goes on after a pause, if its tenant has budgets. Raises JobFailedError if it does
    not fit a hard one, LeaseLostError, and UnavailableError."""
    with closing(JobBudgets(settings.postgres_dsn.get_secret_value(), job.tenant)) as budgets:
        try:
            spec = tenant_topic(settings, codec).read().get(job.tenant)
            if spec is None or not spec.budgets:
                budgets.reserve_nothing(job)
                return
            published = ControlTopic(settings, codec, CONTROL_PRICES, ModelPrices, kind="model").read()
        except ClusterError as error:
            raise UnavailableError(f"Kafka: {error}") from None
        prices, _ = usable_prices({model: one for model, one in published.items() if one is not None})
        contents, _ = source.read(InputPosition(), _SAMPLE_ROWS, _SAMPLE_BYTES)
        rows = [parse_row(content, job.tenant, job.spec.defaults, job.spec.openai_url) for content in contents]
        nanos = job_nanos(rows, job.total_rows, PriceBook(prices), spec.budgets[0].currency, now_ms)
        budgets.reserve(job, spec, nanos, now_ms)
