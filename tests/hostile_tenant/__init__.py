"""Random requests of real Kafka users to everything that is not theirs; run by ``python -m tests.hostile_tenant``."""
