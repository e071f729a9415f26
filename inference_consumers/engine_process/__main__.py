"""``python -m inference_consumers.engine_process DESCRIPTOR MODEL``: started by a consumer, never by hand."""

import sys

from inference_consumers.engine_process.child import main
from inference_consumers.engines.registry import create_engine

if __name__ == "__main__":
    sys.exit(main(create_engine))
