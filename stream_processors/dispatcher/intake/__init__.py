"""Intake: records into valid requests, refusals or dead letters, fair across partitions."""
