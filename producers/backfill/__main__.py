"""``python -m producers.backfill``."""

from producers.backfill.cli import main

main()
