"""Kafka between the services: the transactional loop, and followers of control topics."""
