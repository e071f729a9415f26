"""Attack a secured broker as real users, at random: exit status 1 when one of them gets what is not its own.

Tenants and the consumers of one pool try every request of the broker on the topics, groups, transactional ids and users
of everybody, on a broker of its own with two pipelines. Each answer is held against topics.yaml and docs/security.md.
"""

import argparse
import json
import secrets
import sys

import structlog

from tests.hostile_tenant.run import run


def main(arguments: list[str] | None = None) -> int:
    """Attack, and say what came of it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hostile_tenant", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=_positive, default=100_000, help="default: 100000")
    parser.add_argument("--seed", type=int, help="of all choices; printed when none is given")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    report = run(options.tries, seed, lambda text: print(text, file=sys.stderr, flush=True))  # noqa: T201 - progress
    print(json.dumps(report.as_json()) if options.json else "\n".join(report.lines()))  # noqa: T201
    return 0 if report.is_clean else 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    # The gateway's publisher logs; the output is the report alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
    sys.exit(main())
