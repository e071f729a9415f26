"""A model whose names no topic can have changes nothing."""

from dataclasses import replace

import pytest

from fairlane.records import ModelVersion
from fairlane_server.control.last_good import LastGood
from fairlane_server.control.published_models import check_model

GOOD = ModelVersion("words-1.5", "1", "gpu", "torch", ("generate",), "words", 4_096, 512, dedicated_pools=("own",))


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, pool="gpu a"),
        replace(GOOD, pool=""),
        replace(GOOD, pool="a" * 250),
        replace(GOOD, dedicated_pools=("own", "gpu/a")),
        replace(GOOD, model="another"),
    ],
    ids=lambda model: f"{model.model} {model.pool[:9]} {model.dedicated_pools}",
)
def test_the_last_good_model_stays(bad: ModelVersion) -> None:
    registry = LastGood(check_model, "model_unusable")
    assert registry.usable({GOOD.model: bad}) == {}
    assert registry.usable({GOOD.model: GOOD}) == {GOOD.model: GOOD}
    two = {GOOD.model: bad, "no name": replace(GOOD, model="no name")}
    assert registry.usable(two) == {GOOD.model: GOOD}
    assert registry.usable(two) is registry.usable(two)
    assert registry.usable({}) == {}
