"""Evaluation: copies that a shadow makes of dispatched requests, and copies that wait for an idle pool."""
