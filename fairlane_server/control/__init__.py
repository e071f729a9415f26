"""Tenants and models: their files, and publishing them to the control topics."""
