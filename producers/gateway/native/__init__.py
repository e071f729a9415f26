"""Fairlane's own HTTP API: requests whose result is waited for or fetched later."""
