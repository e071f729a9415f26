"""What the process of an engine makes of what its consumer sends."""

import msgspec

from fairlane.records import Message, Parameters, Passage, RequestInput
from inference_consumers.engine_process.child import item_name, named_items
from inference_consumers.engine_process.messages import Run, to_engine
from inference_consumers.engines.protocol import EngineItem


def test_two_requests_of_the_same_id_are_two_items() -> None:
    """Ids are their tenants' own: a cancel of one must not stop the other."""
    item = EngineItem("same", "generate", RequestInput(prompt="hello"), Parameters())
    names = [one.item_id for run_id in (1, 12) for one in named_items(Run(run_id, (item,) * 12))]
    assert len(set(names)) == len(names)
    assert names == [item_name(run_id, index) for run_id in (1, 12) for index in range(12)]


def test_an_item_arrives_whole() -> None:
    item = EngineItem(
        "id",
        "generate",
        RequestInput(prompt="hello"),
        Parameters(),
        (Passage("p", "text", 0.5),),
        100,
        (Message("user", "before"), Message("assistant", "then")),
    )
    run = Run(1, (item,))
    assert to_engine.decode(msgspec.msgpack.encode(run)) == run
