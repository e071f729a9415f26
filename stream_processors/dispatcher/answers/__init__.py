"""Answering requests from the response cache."""
