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
        ids = ("DEAD_LETTER_REPLAY_IDS", "MODEL_CHANGES_ID")
        own = {name: getattr(names, name).removeprefix(names.TOPIC_PREFIX) for name in ids}
        patch.setattr(names, "TOPIC_PREFIX", prefix)
        for name, value in own.items():
            patch.setattr(names, name, prefix + value)
        yield
