"""``python -m tests.kit.stuck_dispatcher``: a dispatcher whose first join of its group never ends."""

import asyncio
import sys
from unittest import mock

from stream_processors.dispatcher import app

_PATIENCE_S = 1.0


async def never(*_: object) -> None:
    await asyncio.Event().wait()


if __name__ == "__main__":
    with (
        mock.patch("stream_processors.dispatcher.reading.stream.RequestStream.start", never),
        mock.patch("stream_processors.dispatcher.app._MAX_OUTSIDE_GROUP_S", _PATIENCE_S),
    ):
        sys.exit(app.main())
