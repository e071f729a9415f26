"""The attributes of CloudEvents that requests and replies carry."""

from fairlane import cloud_events
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane_server.kafka.settlement import reply_record

REQUIRED = {"ce_id", "ce_source", "ce_type", "ce_specversion", "content-type"}
REQUEST_ID = "0190a7c5-0000-7000-8000-000000000001"


def answered(offset: int, outcome: str = "ok") -> dict[str, bytes]:
    source = SourceCoordinate("requests.acme", 0, offset)
    return dict(cloud_events.of_reply(InferenceReply(REQUEST_ID, "acme", outcome, source=source)))


def test_every_event_has_the_required_attributes_and_says_it_is_avro() -> None:
    events = (
        dict(cloud_events.of_request("acme", REQUEST_ID)),
        dict(cloud_events.of_cancellation("acme", REQUEST_ID)),
        answered(17),
        dict(cloud_events.of_reply(InferenceReply(REQUEST_ID, "acme", "ok"))),
    )
    for event in events:
        assert event.keys() == REQUIRED
        assert all(event.values())
        assert (event["ce_specversion"], event["content-type"]) == (b"1.0", b"application/avro")
        assert event["ce_source"] == b"/fairlane/tenants/acme"
    # A type names the Avro record that the value is.
    assert [event["ce_type"].decode() for event in events[:3]] == [
        "fairlane.InferenceRequest",
        "fairlane.CancelRequest",
        "fairlane.InferenceReply",
    ]


def test_distinct_events_have_distinct_ids_and_a_copy_has_the_same() -> None:
    """An id that was refused, sent again and answered has two replies, and who drops repeated events must see both."""
    request = dict(cloud_events.of_request("acme", REQUEST_ID))["ce_id"]
    cancellation = dict(cloud_events.of_cancellation("acme", REQUEST_ID))["ce_id"]
    refusal, answer = answered(17, "rejected")["ce_id"], answered(23)["ce_id"]
    assert len({request, cancellation, refusal, answer}) == 4
    assert request == dict(cloud_events.of_request("acme", REQUEST_ID))["ce_id"]
    assert answer == answered(23)["ce_id"] == b"requests.acme-0@23"


def test_the_record_of_a_reply_has_its_key_its_event_and_its_trace() -> None:
    reply = InferenceReply(REQUEST_ID, "acme", "ok", source=SourceCoordinate("requests.acme", 0, 1))
    record = reply_record("replies.acme", reply, b"value", (("traceparent", b"t"),))
    assert (record.topic, record.key, record.value) == ("replies.acme", REQUEST_ID.encode(), b"value")
    assert dict(record.headers) == dict(cloud_events.of_reply(reply)) | {"traceparent": b"t"}
