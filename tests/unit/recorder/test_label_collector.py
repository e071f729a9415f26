"""What the queue of labels is filled with: its bound, and the input of an item."""

import base64
import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceRequest, Message, Passage, RequestInput, SourceCoordinate, WorkItem
from stream_processors.recorder.label_collector import LabelSource, erasable, within_bound
from stream_processors.recorder.label_sources import input_of
from stream_processors.recorder.tables import json_text

PLACE = SourceCoordinate("priority.p.normal", 0, 1)


@given(
    st.lists(st.sampled_from(["acme", "globex", "initech"]), max_size=30),
    st.dictionaries(st.sampled_from(["acme", "globex"]), st.integers(0, 12)),
    st.integers(0, 8),
)
def test_no_tenant_gets_more_open_items_than_the_bound_and_none_less_than_it_may(
    tenants: list[str], queued: dict[str, int], most: int
) -> None:
    found = [LabelSource(tenant, f"r-{number}", "feedback", PLACE) for number, tenant in enumerate(tenants)]
    kept = within_bound(found, queued, most)
    assert [one for one in found if one in kept] == kept, "in their order"
    for tenant in set(tenants):
        room = max(0, most - queued.get(tenant, 0))
        assert sum(one.tenant == tenant for one in kept) == min(room, tenants.count(tenant))


def item(content: RequestInput, **fields: object) -> WorkItem:
    request = InferenceRequest("r-1", "words", "generate", content)
    return WorkItem(request, "acme", "p", "2", "normal", 1, 1, 1, 1, 1, "replies.acme", "d", PLACE, **fields)  # type: ignore[arg-type]  # fields of the item


def stored(work: WorkItem) -> object:
    return json.loads(json_text(input_of(work)))


def test_an_item_has_what_the_model_got() -> None:
    asked = Message("user", "And now?")
    assert stored(item(RequestInput(messages=(asked,)))) == {"messages": [{"role": "user", "content": "And now?"}]}
    told = item(
        RequestInput(prompt="p"), history=(Message("user", "Hello"),), passages=(Passage("p-1", "a passage", 0.5),)
    )
    assert stored(told) == {
        "prompt": "p",
        "history": [{"role": "user", "content": "Hello"}],
        "passages": [{"passage_id": "p-1", "text": "a passage", "score": 0.5}],
    }
    picture = input_of(item(RequestInput(image=b"\x89PNG")))
    assert base64.b64decode(picture["image"]) == b"\x89PNG"


def test_an_item_is_kept_out_by_its_request_the_first_one_its_conversation_and_an_erased_turn_before_it() -> None:
    alone = item(RequestInput(prompt="p"))
    assert erasable(alone) == [("request", "r-1")]
    again = replace(alone, request=replace(alone.request, replay_of="r-0", conversation_id="talk"))
    assert erasable(again) == [("request", "r-1"), ("request", "r-0"), ("conversation", "talk")]
    told = replace(again, history=(Message("user", "Hello"),))
    assert erasable(told) == [*erasable(again), ("history", "talk")]
