"""Every metric, declared once: the unit in the name, bounded labels (tenants by control.tenants)."""

from prometheus_client import Counter, Gauge, Histogram

_LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

REQUESTS_READ = Counter("fairlane_requests_read_total", "Requests read from tenants' topics", ["tenant"])
DECISIONS = Counter("fairlane_decisions_total", "Decisions of the dispatcher", ["tenant", "decision", "code"])
DEAD_LETTERS = Counter("fairlane_dead_letters_total", "Records sent to a dead-letter topic", ["topic", "problem"])
REPLIES = Counter("fairlane_replies_total", "Final replies committed by the consumers", ["tenant", "outcome", "code"])
BATCH_ITEMS = Histogram(
    "fairlane_batch_items", "Items per micro-batch", ["model"], buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)
BATCH_WAIT_SECONDS = Histogram(
    "fairlane_batch_wait_seconds",
    "From the read of an item to the start of its batch",
    ["model"],
    buckets=_LATENCY_BUCKETS_S,
)
ENGINE_SECONDS = Histogram(
    "fairlane_engine_seconds", "Run time of a micro-batch", ["model"], buckets=_LATENCY_BUCKETS_S
)
TOKENS = Counter("fairlane_tokens_total", "Tokens spent", ["tenant", "model", "kind"])
PREFETCHED_ITEMS = Gauge("fairlane_prefetched_items", "Items held in memory, waiting for a batch", ["priority"])

TRANSACTION_SECONDS = Histogram(
    "fairlane_transaction_seconds", "Begin to commit of one Kafka transaction", buckets=_LATENCY_BUCKETS_S
)
TRANSACTION_RECORDS = Histogram(
    "fairlane_transaction_records",
    "Source records settled per transaction",
    buckets=(1, 4, 16, 64, 256, 512, 1024),
)
TRANSACTIONS_ABORTED = Counter("fairlane_transactions_aborted_total", "Transactions aborted and retried", ["reason"])
PARTITIONS_PAUSED = Gauge("fairlane_partitions_paused", "Partitions paused because too much of them is undone")
LOG_TRUNCATED = Counter(
    "fairlane_log_truncated_total",
    "ALARM: a committed offset was no longer in the log, records are lost",
    ["topic"],
)
STALE_SETTLEMENTS = Counter("fairlane_stale_settlements_total", "Finished work dropped because its partition moved on")

RECORDED = Counter("fairlane_recorded_total", "Records projected into Postgres", ["record"])
RECORDER_SKIPPED = Counter(
    "fairlane_recorder_skipped_total",
    "Records that could not be projected; the log of the recorder names their place",
    ["topic", "problem"],
)
COMMITTED_TWICE = Counter(
    "fairlane_committed_twice_total",
    "ALARM: outcomes beyond the first that were committed for one request or one piece of work",
    ["record"],
)
RECORDER_LAG = Gauge("fairlane_recorder_lag_records", "Records not yet projected", ["topic"])
READY = Gauge("fairlane_ready", "1 when the process is ready")
