"""Requests that are answered with what was answered before."""
