"""Load from a trace: arrivals, lengths and tenants as they were, against the client or the gateway."""
