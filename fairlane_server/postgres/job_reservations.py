"""SQL about what batch jobs have reserved of the budgets of their tenants."""

LEFT = (
    "reserved_nanos::numeric * (total_rows - greatest(answered_rows, ok_rows + failed_rows + expired_rows "
    "+ cancelled_rows)) / total_rows"
)
"""What a job still has reserved: for its rows without a result. The sums by outcome are of finished chunks."""

HOLDING = "reserved_nanos > 0 AND total_rows > 0 AND status IN ('queued', 'running', 'cancelling', 'finalizing')"
"""Which jobs hold their reservation: not those that have ended, failed or are paused."""
