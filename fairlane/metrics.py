"""All Prometheus metrics, declared once, with units in their names and bounded labels (``control.tenants`` bounds
tenants)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import TypeVar

from prometheus_client import Counter, Gauge, Histogram

from fairlane.money import NANOS_PER_UNIT
from fairlane.records import Cost

LabelsT = TypeVar("LabelsT", bound=tuple[str, ...])

_LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


def _latency(name: str, what: str, labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, what, labels, buckets=_LATENCY_BUCKETS_S)


REQUESTS_READ = Counter("fairlane_requests_read_total", "Requests read from tenants' topics", ["tenant"])
DECISIONS = Counter("fairlane_decisions_total", "Decisions of the dispatcher", ["tenant", "decision", "code"])
CANCELS_PASSED_ON = Counter("fairlane_cancels_passed_on_total", "Cancels forwarded to the consumers", ["tenant"])
DEGRADATIONS = Counter("fairlane_degradations_total", "Degradation steps taken", ["tenant", "step"])
STAGE_CPU_SECONDS = Counter("fairlane_stage_cpu_seconds_total", "Processor time of the dispatcher's stages", ["stage"])
WAITING_REQUESTS = Gauge("fairlane_waiting_requests", "Requests waiting to be scheduled", ["pool", "priority_class"])
WAITING_TOKENS = Gauge("fairlane_waiting_cost_tokens", "Estimated cost of waiting requests", ["pool", "priority_class"])
WAIT_SECONDS = _latency("fairlane_wait_seconds", "From submission to dispatch", ["pool", "priority_class"])
RETRIEVALS = Counter(
    "fairlane_retrievals_total", "Retrievals by mode, and the reason for less than the full one", ["mode", "reason"]
)
RETRIEVALS_UNDER_WAY = Gauge("fairlane_retrievals_under_way", "Retrievals in progress")
HISTORIES = Counter("fairlane_histories_total", "Look-ups of earlier turns, by the reason of a failure", ["reason"])
RETRIEVAL_SECONDS = _latency("fairlane_retrieval_seconds", "Duration of a retrieval")
IN_FLIGHT_TOKENS = Gauge("fairlane_in_flight_cost_tokens", "Cost dispatched and not settled, fleet-wide", ["pool"])
WINDOW_TOKENS = Gauge("fairlane_window_cost_tokens", "Maximum cost in flight, fleet-wide", ["pool"])
WINDOW_SHARE = Gauge("fairlane_window_share", "This dispatcher's share of the window, 0 to 1", ["pool"])
POOL_CONSUMERS = Gauge("fairlane_pool_consumers", "Consumers that report; 0 means no capacity", ["pool"])
POOL_TOKENS_PER_S = Gauge("fairlane_pool_cost_tokens_per_s", "Measured capacity of the consumers that report", ["pool"])
POOL_LOST_SECONDS = Gauge(
    "fairlane_pool_lost_seconds", "Time since the last report of a pool without consumers", ["pool"]
)
DISPATCHERS = Gauge("fairlane_dispatchers", "Dispatchers that report, this one included")
BACKFILL_PAUSED = Gauge("fairlane_backfill_paused_tenants", "Tenants whose backfill topic is paused")
SERVED_TOKENS = Counter("fairlane_served_cost_tokens_total", "Cost of completed work", ["tenant", "pool"])
DEAD_LETTERS = Counter("fairlane_dead_letters_total", "Records sent to a dead-letter topic", ["topic", "problem"])
UNREADABLE_BATCHES = Counter("fairlane_unreadable_batches_total", "Unreadable batches of tenants' topics", ["problem"])
FETCHES_REFUSED = Counter(
    "fairlane_fetches_refused_total", "Fetches of a partition that a broker answered with an error", ["error"]
)
REPLIES = Counter("fairlane_replies_total", "Final replies committed by the consumers", ["tenant", "outcome", "code"])
BATCH_ITEMS = Histogram(
    "fairlane_batch_items", "Items per micro-batch", ["model"], buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)
BATCH_WAIT_SECONDS = _latency(
    "fairlane_batch_wait_seconds", "From the read of an item to the start of its batch", ["model"]
)
ENGINE_SECONDS = _latency("fairlane_engine_seconds", "Run time of a micro-batch", ["model"])
ENGINE_BUSY_SECONDS = Counter(
    "fairlane_engine_busy_seconds_total",
    "Time in which an engine was running anything; overlapping runs count once",
    ["model"],
)
TOKENS = Counter("fairlane_tokens_total", "Tokens processed", ["tenant", "model", "kind"])
COST = Counter(
    "fairlane_cost_total",
    "Cost of requests, in units of the currency; exact sums are in Postgres",
    ["tenant", "model", "currency"],
)
BUDGET_SPENT_RATIO = Gauge(
    "fairlane_budget_spent_ratio",
    "Spent in the present period over the budget; of each key or user: of the one that spent most",
    ["tenant", "of", "period", "limit"],
)
BUDGETS_UNKNOWN = Gauge("fairlane_budgets_unknown", "Tenants with budgets whose spending is not known yet")
BUDGET_RESERVATIONS_LOST = Counter(
    "fairlane_budget_reservations_lost_total", "Reservations of budgets dropped because their end was not read"
)
SPEND_ANOMALY_RATIO = Gauge(
    "fairlane_spend_anomaly_ratio",
    "Spent in this hour, or in the one before, over what is usual for the tenant at this time of the day",
    ["tenant", "currency"],
)
UNPRICED = Counter("fairlane_unpriced_total", "Requests without a known cost: no price was in force", ["model"])
HANDED_BACK = Counter(
    "fairlane_handed_back_total",
    "Work returned to the dispatchers: no engine had room for it, its engine hung, or its version was not loaded",
    ["tenant", "model"],
)
CAPACITY_TOKENS_PER_SECOND = Gauge(
    "fairlane_capacity_tokens_per_second",
    "Tokens per second of engine time at the best batch size, as reported to the dispatchers",
    ["kind"],
)
ENGINE_FAILING = Gauge("fairlane_engine_failing", "1 while none of the latest micro-batches had a success")
CAPACITY_REPORTS_LOST = Counter(
    "fairlane_capacity_reports_lost_total", "Capacity reports that were not delivered", ["reason"]
)
BATCH_FILL = Histogram(
    "fairlane_batch_fill",
    "Fill level of micro-batches, by the fuller of their bounds on items and tokens",
    ["model"],
    buckets=(0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
)
COMPUTED_TOKENS = Counter(
    "fairlane_computed_tokens_total", "Tokens that engines computed; padding is counted apart", ["model", "kind"]
)
FIRST_TOKEN_SECONDS = _latency(
    "fairlane_time_to_first_token_seconds", "From the read of a streaming item to its first text", ["model"]
)
INTER_TOKEN_SECONDS = _latency("fairlane_inter_token_seconds", "Time between two texts of a streaming item", ["model"])
RETRIES = Counter("fairlane_retries_total", "Repeated runs of items", ["model", "reason"])
OUT_OF_MEMORY = Counter(
    "fairlane_out_of_memory_total", "Runs that failed because the engine ran out of memory", ["model"]
)
ENGINE_RESTARTS = Counter(
    "fairlane_engine_restarts_total", "Engine processes that died or were ended", ["model", "end"]
)
MODEL_LOADS = Counter(
    "fairlane_model_loads_total", "Versions that a consumer loaded, or did not manage to load", ["model", "result"]
)
VERSIONS_MISSING = Gauge(
    "fairlane_versions_missing", "Versions that this consumer should serve and does not, by the reason", ["state"]
)
ENGINE_MEMORY_BYTES = Gauge(
    "fairlane_engine_memory_bytes", "Memory of a model's loaded versions, measured after loading", ["model", "kind"]
)
MEMORY_NEEDED_BYTES = Gauge(
    "fairlane_memory_needed_bytes",
    "Predicted memory of the model's version that was last to be loaded",
    ["model", "kind"],
)
MEMORY_FREE_BYTES = Gauge(
    "fairlane_memory_free_bytes", "Memory left for engines when a version was last to be loaded", ["kind"]
)
CHUNKS_LOST = Counter("fairlane_chunks_lost_total", "Streamed texts that were not delivered", ["reason"])
ARTIFACT_FAILURES = Counter(
    "fairlane_artifact_failures_total", "Versions that were not loaded because of their files", ["model", "reason"]
)
ARTIFACTS_CHANGED = Gauge(
    "fairlane_artifacts_changed", "Registered versions whose files were replaced at their source", ["model"]
)
CANCELLED_RUNNING = Counter("fairlane_cancelled_running_total", "Items cancelled while an engine ran them", ["model"])
GUARDRAIL_VERDICTS = Counter(
    "fairlane_guardrail_verdicts_total", "Verdicts of guardrails", ["tenant", "stage", "check", "verdict"]
)
GUARDRAIL_SECONDS = _latency("fairlane_guardrail_seconds", "Duration of a question to a check's process", ["check"])
GUARDRAIL_FAILURES = Counter(
    "fairlane_guardrail_failures_total", "Calls of a check that were not answered", ["check", "reason"]
)
GUARDRAIL_READY = Gauge("fairlane_guardrail_ready", "ALARM at 0: whether the process of a check in use runs", ["check"])
GUARDRAIL_RESTARTS = Counter(
    "fairlane_guardrail_restarts_total", "Processes of checks that died or were ended", ["check", "end"]
)
RUNNING_ITEMS = Gauge("fairlane_running_items", "Items that an engine is processing", ["model"])
PREFETCHED_ITEMS = Gauge("fairlane_prefetched_items", "Items held in memory, waiting for a batch", ["priority"])

TRANSACTION_SECONDS = _latency("fairlane_transaction_seconds", "Time from begin to commit of a Kafka transaction")
TRANSACTION_RECORDS = Histogram(
    "fairlane_transaction_records",
    "Source records settled per transaction",
    buckets=(1, 4, 16, 64, 256, 512, 1024),
)
TRANSACTIONS_ABORTED = Counter("fairlane_transactions_aborted_total", "Transactions aborted and retried", ["reason"])
NOTES_DROPPED = Counter("fairlane_notes_dropped_total", "Audit events of admissions that their topic did not accept")
OPTIONAL_RECORDS_LEFT_OUT = Counter(
    "fairlane_optional_records_left_out_total",
    "Copies for evaluation that their topic did not accept; the work that they are copies of was committed",
    ["topic"],
)
PARTITIONS_PAUSED = Gauge(
    "fairlane_partitions_paused", "Partitions paused because too many of their records are unfinished"
)
SCHEMA_WAITING_RECORDS = Gauge(
    "fairlane_schema_waiting_records", "Records waiting for the schema registry, with those behind them"
)
SCHEMA_LOOKUPS = Counter("fairlane_schema_lookups_total", "Registry look-ups of unknown schema ids", ["outcome"])
LOG_TRUNCATED = Counter(
    "fairlane_log_truncated_total",
    "ALARM: retention removed records before they were read",
    ["topic"],
)
LOG_REPLACED = Counter(
    "fairlane_log_replaced_total",
    "ALARM: a stored position is not in the log: the log ends before it (reading continues at the end), or its topic "
    "was created again (it is read from its beginning)",
    ["topic", "finding"],
)
REDIS_REFUSED_WRITES = Counter(
    "fairlane_redis_refused_writes_total",
    "ALARM: writes that the Redis for state did not store",
    ["kind", "reason"],
)
REDIS_STATE_EVICTED = Gauge(
    "fairlane_redis_state_evicted_keys", "ALARM above 0: keys that the Redis for state evicted since it started"
)
REDIS_STATE_MEMORY_SHARE = Gauge(
    "fairlane_redis_state_memory_share", "Used memory of the Redis for state as a share of its maxmemory"
)
REDIS_STATE_UNSAFE = Gauge(
    "fairlane_redis_state_unsafe",
    "ALARM above 0: settings with which the Redis for state may lose entries (a policy other than noeviction, no AOF)",
)
BLOCKED_SETTLEMENTS = Gauge("fairlane_blocked_settlements", "Decided work and answers whose topic refuses records")
STALE_SETTLEMENTS = Counter(
    "fairlane_stale_settlements_total", "Finished work dropped because its partition was reassigned"
)

SATISFACTION_RATIO = Gauge(
    "fairlane_satisfaction_ratio",
    "Mean rating of the requests that were rated in the last 24 hours, from 0 to 1",
    ["model", "version", "arm"],
)
RATED_REQUESTS = Gauge(
    "fairlane_rated_requests", "Requests that were rated in the last 24 hours", ["model", "version", "arm"]
)
SHADOW_SAMPLED = Counter(
    "fairlane_shadow_sampled_total",
    "Requests sampled by a shadow: copied, or the reason why no copy was made",
    ["model", "result"],
)
COPIES_WAITING = Gauge("fairlane_evaluation_copies_waiting", "Copies that wait for an idle pool", ["pool"])
COPIES_UNREADABLE = Counter(
    "fairlane_evaluation_copies_unreadable_total", "Copies that no dispatcher can read", ["problem"]
)
COPIES_ENDED = Counter(
    "fairlane_evaluation_copies_total", "Copies for evaluation by how they ended, as recorded", ["kind", "arm", "ended"]
)
DRIFT_FINDINGS = Gauge(
    "fairlane_drift_findings", "ALARM above 0: findings of drift in the last 24 hours", ["tenant", "model", "statistic"]
)
DRIFT_STATISTICS = Gauge("fairlane_drift_statistics", "Statistics that drift is looked for in, by phase", ["phase"])
EVALUATION_SCORE_RATIO = Gauge(
    "fairlane_evaluation_score_ratio",
    "Mean score of the last scheduled evaluation run of a version, from 0 to 1",
    ["tenant", "model", "version"],
)
EVALUATION_FELL = Gauge(
    "fairlane_evaluation_fell",
    "1 if this run is worse than its baseline by more than chance explains",
    ["tenant", "model", "version"],
)
EVALUATION_OVERDUE = Gauge(
    "fairlane_evaluation_overdue", "1 if a schedule has had no result for twice its time", ["tenant", "model"]
)
LABELS_QUEUED = Counter("fairlane_labels_queued_total", "Outputs queued for labelling", ["origin"])
UNREADABLE_RECORDS = Counter(
    "fairlane_unreadable_records_total",
    "Offsets and records that a reader skipped because it cannot read their bytes; its log names their position",
    ["reader", "problem"],
)
RECORDED = Counter("fairlane_recorded_total", "Records projected into Postgres", ["record"])
ROWS_REMOVED = Counter("fairlane_rows_removed_total", "Expired rows removed from Postgres", ["table"])
RETENTION_LAG = Gauge(
    "fairlane_retention_lag_seconds",
    "Upper bound of the age of the oldest row beyond its table's retention; grows while removals fail",
    ["table"],
)
RECORDER_SKIPPED = Counter(
    "fairlane_recorder_skipped_total",
    "Records that could not be projected; the log of the recorder names their position",
    ["topic", "problem"],
)
COMMITTED_TWICE = Counter(
    "fairlane_committed_twice_total",
    "ALARM: committed outcomes beyond the first for one request or one work item",
    ["record"],
)
RECORDER_LAG = Gauge("fairlane_recorder_lag_records", "Records not yet projected", ["topic"])
READY = Gauge("fairlane_ready", "1 when the process is ready")
WORK_FEED_LAG = Gauge(
    "fairlane_work_feed_lag_records", "Records of work and heartbeats that the dispatcher has not read"
)
WORK_FEED_AGE_SECONDS = Gauge(
    "fairlane_work_feed_age_seconds", "Age of the dispatcher's oldest information about a pool"
)
WORK_FEED_UNREADABLE = Counter(
    "fairlane_work_feed_unreadable_total",
    "Records of work, usage and heartbeats that a dispatcher skipped; its log names their position",
    ["topic"],
)
CLOCK_SKEW_SECONDS = Gauge(
    "fairlane_clock_skew_seconds",
    "Difference between the dispatcher's clock and the broker's; negative if the dispatcher's is behind",
)
DISPATCH_REPORTS_LOST = Counter(
    "fairlane_dispatch_reports_lost_total", "Heartbeats of a dispatcher that were not delivered", ["reason"]
)
CACHE_LOOKUPS = Counter(
    "fairlane_cache_lookups_total", "Look-ups in the caches of dispatcher and gateway", ["cache", "result"]
)
CACHE_WRITES = Counter("fairlane_cache_writes_total", "Writes to the Redis for caches", ["cache", "result"])
REPLIES_SERVED = Counter(
    "fairlane_replies_served_total",
    "Records of a reply topic that a service has finished, by result",
    ["topic", "result"],
)
REPLY_HANDLER_FAILURES = Counter(
    "fairlane_reply_handler_failures_total", "Calls of a service's handler that raised", ["topic"]
)
REPLY_HANDLER_SECONDS = _latency(
    "fairlane_reply_handler_seconds", "Duration of a call of a service's handler", ["topic"]
)
AUTHENTICATIONS_REFUSED = Counter(
    "fairlane_authentications_refused_total", "Calls that the gateway refused by identity", ["reason"]
)
LOGINS = Counter("fairlane_logins_total", "Logins of browsers, by result: ok, or why one was refused", ["result"])
CALLS_LIMITED = Counter(
    "fairlane_calls_limited_total",
    "Calls of the gateway refused because of the limit of a key, a user or a tenant",
    ["tenant"],
)

GATEWAY_CALLS = Counter("fairlane_gateway_calls_total", "Finished calls of the gateway", ["route", "status"])
GATEWAY_CALL_SECONDS = _latency(
    "fairlane_gateway_call_seconds", "From the head of a call to the end of its answer", ["route"]
)
GATEWAY_CONNECTIONS = Gauge("fairlane_gateway_connections", "Open connections to the gateway")
GATEWAY_CONNECTIONS_CUT = Counter(
    "fairlane_gateway_connections_cut_total", "Connections refused or closed by the gateway", ["reason"]
)
GATEWAY_BODY_BYTES = Gauge(
    "fairlane_gateway_body_bytes", "Bytes of bodies that are being read, or were read and are not published yet"
)
GATEWAY_BODIES_REFUSED = Counter(
    "fairlane_gateway_bodies_refused_total", "Bodies refused because of the body budget", ["bound"]
)
GATEWAY_MEMORY_TRIMS = Counter("fairlane_gateway_memory_trims_total", "Heap trims after a peak of bodies")
GATEWAY_WAITING = Gauge("fairlane_gateway_waiting_calls", "Calls that wait for the reply to a request")
GATEWAY_REFUSED_EARLY = Counter(
    "fairlane_gateway_refused_early_total", "Requests refused before they were published", ["code"]
)
GATEWAY_LOOK_UPS = Counter(
    "fairlane_gateway_reply_look_ups_total",
    "Look-ups of recorded replies, for calls whose partition was reassigned",
    ["result"],
)
BACKFILL_JOBS = Gauge("fairlane_backfill_jobs", "Unfinished and failed offline jobs of the fleet", ["status"])
BACKFILL_RUNNING_JOBS = Gauge("fairlane_backfill_running_jobs", "Offline jobs that run in this process")
BACKFILL_WAITING_ROWS = Gauge(
    "fairlane_backfill_waiting_rows", "Unfinished rows of the fleet's jobs that are neither paused nor failed"
)
BACKFILL_ROWS = Counter("fairlane_backfill_rows_total", "Rows of offline jobs with a recorded outcome", ["outcome"])
INGEST_DOCUMENTS = Gauge("fairlane_ingest_documents", "Uploaded documents of the fleet on their way", ["state"])
INGESTED_DOCUMENTS = Counter("fairlane_ingested_documents_total", "Ingestions that ended in this process", ["outcome"])
GATEWAY_REPLY_PARTITIONS = Gauge(
    "fairlane_gateway_reply_partitions", "Partitions of the reply topic that this instance reads"
)
GATEWAY_UNREADABLE = Counter(
    "fairlane_gateway_unreadable_records_total", "Skipped replies and chunks", ["record", "problem"]
)


LOG_REPLAYS_OPEN = Gauge("fairlane_log_replays_open", "Replays of the log that are planned or running")
LOG_REPLAY_COPIES = Counter("fairlane_log_replay_copies_total", "Copies that replays of the log wrote", ["model"])
ROLLOUT_STEP = Gauge("fairlane_rollout_step", "Present step of a rollout that is under way, from 0", ["model"])
ROLLOUT_DECISIONS = Counter("fairlane_rollout_decisions_total", "Decisions of the controller", ["model", "decision"])
ROLLOUT_LOOKS_FAILED = Counter(
    "fairlane_rollout_looks_failed_total", "Looks at a rollout without a decision, since a server failed", ["server"]
)


def forget_tenants(tenants: Iterable[str]) -> None:
    """Remove the series that a dispatcher keeps for these tenants."""
    for tenant in tenants:
        for metric in (REQUESTS_READ, DECISIONS, CANCELS_PASSED_ON, DEGRADATIONS, SERVED_TOKENS, COST):
            metric.remove_by_labels({"tenant": tenant})


def show(gauge: Gauge, values: Mapping[LabelsT, float], shown: Iterable[LabelsT]) -> set[LabelsT]:
    """Set a gauge to the values by their labels, and remove those of ``shown`` that have none any more. Returns the
    labels that are shown now."""
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    for labels in set(shown) - values.keys():
        gauge.remove(*labels)
    return set(values)


def count_cost(tenant: str, model: str, cost: Cost | None) -> None:
    """Count the cost of a request, or that it is not known."""
    if cost is None:
        UNPRICED.labels(model=model).inc()
    elif cost.nanos:
        COST.labels(tenant=tenant, model=model, currency=cost.currency).inc(cost.nanos / NANOS_PER_UNIT)


@contextmanager
def stage_time(stage: str) -> Iterator[None]:
    """Add the processor time that this thread uses in the context, or in the function decorated, to the stage's. For a
    batch, not for each record."""
    started_s = thread_time()
    try:
        yield
    finally:
        STAGE_CPU_SECONDS.labels(stage).inc(thread_time() - started_s)
