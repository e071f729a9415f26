"""Output: decisions as records, and the dispatcher's heartbeat."""
