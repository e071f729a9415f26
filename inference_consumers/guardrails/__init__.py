"""Guardrails: checks of a request's texts before inference, and of its answer after it."""
