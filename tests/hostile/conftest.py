"""What only these tests need: the files of the broker they run on."""

from pathlib import Path

import pytest

from tests.kit.stack import CHOICE_VARIABLE, EmbeddedStack, ServerStack


@pytest.fixture(scope="session")
def broker_log_dir(test_stack: ServerStack, broker: str) -> Path:
    """The folder of the partitions of the broker that `broker` names; see `tests.kit.broker_log`."""
    if not isinstance(test_stack, EmbeddedStack):
        pytest.fail(f"this test writes into the files of the broker: it needs {CHOICE_VARIABLE}=embedded")
    return test_stack.kafka_log_dir
