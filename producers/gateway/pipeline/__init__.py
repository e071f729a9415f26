"""Kafka pipeline of the gateway: publishing, replies, streamed text, and load."""
