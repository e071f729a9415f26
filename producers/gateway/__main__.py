"""``python -m producers.gateway``"""

import sys

from producers.gateway.server import main

sys.exit(main())
