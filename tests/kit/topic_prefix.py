"""Names of a pipeline with another TOPIC_PREFIX, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fairlane import names


@contextmanager
def topic_prefix(prefix: str) -> Iterator[None]:
    """Functions of ``fairlane.names`` for groups and topics of topics.yaml give what a process with this TOPIC_PREFIX
    has. Topics with a tenant or a pool in them are made at import and stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        replay_id = names.DEAD_LETTER_REPLAY_IDS.removeprefix(names.TOPIC_PREFIX)
        patch.setattr(names, "TOPIC_PREFIX", prefix)
        patch.setattr(names, "DEAD_LETTER_REPLAY_IDS", prefix + replay_id)
        yield
