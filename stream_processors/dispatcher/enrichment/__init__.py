"""Enrichment: passages and conversation history, looked up while a request waits."""
