"""Offline jobs: millions of rows from a file, through the backfill topics, into a file."""
