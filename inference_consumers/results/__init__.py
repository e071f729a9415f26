"""Results: what a run's outcomes become (replies, usage, dead letters, requeues), and who writes them."""
