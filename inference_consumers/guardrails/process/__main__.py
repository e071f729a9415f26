"""``python -m inference_consumers.guardrails.process DESCRIPTOR CHECK``: started by a consumer, never by hand."""

import sys

from inference_consumers.guardrails.process.child import main
from inference_consumers.guardrails.registry import load_one

if __name__ == "__main__":
    sys.exit(main(load_one))
