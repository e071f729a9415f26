"""``python -m stream_processors.recorder``"""

import sys

from stream_processors.recorder.app import main

sys.exit(main())
