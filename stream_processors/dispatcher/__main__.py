"""``python -m stream_processors.dispatcher``"""

import sys

from stream_processors.dispatcher.app import main

sys.exit(main())
