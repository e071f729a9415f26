"""The load as `fairlane top` shows it, for calls that come now and then."""

import time

from fairlane.clock import now_ms
from fairlane.closing import Closing
from fairlane.codec import Codec
from fairlane.settings import Settings
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.load_board import LoadBoard, LoadView
from fairlane_server.kafka.load_feed import LoadFeed

_SETTLE_S = 0.6
"""Two heartbeats of everybody."""
_FRESH_S = 0.5
_CATCH_UP_S = 0.2
_IDLE_S = 60.0
"""A feed without a reader for so long starts anew: else it would read all records since then."""


class Observer(Closing):
    """For one thread at a time. The feed of loads is kept between calls."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._feed: LoadFeed | None = None
        self._board = LoadBoard()
        self._asked_at = 0.0

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def loads(self) -> tuple[LoadView, str | None]:
        """The load now, and why no reports come in. Raises ClusterError."""
        now = time.monotonic()
        if now - self._asked_at > _IDLE_S:
            self.close()
        try:
            if self._feed is None:
                self._board = LoadBoard()
                self._feed = LoadFeed(self._settings, self._codec, self._board)
                self._feed.catch_up()
                self._feed.follow(_SETTLE_S)
            elif now - self._asked_at > _FRESH_S:
                self._feed.follow(_CATCH_UP_S)
        except ClusterError:
            self.close()
            raise
        self._asked_at = time.monotonic()
        return self._board.view(now_ms()), self._feed.trouble
