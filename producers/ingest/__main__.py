"""``python -m producers.ingest``"""

import sys

from producers.ingest.app import main

if __name__ == "__main__":
    sys.exit(main())
