"""Fairlane's own API over HTTP: requests that are sent and asked for later, or waited for."""
