"""Replies and chunks of a stream."""

from fairlane.records import CancelRequest, InferenceReply, Output, ReplyChunk
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConnector, chunk_message, reply_message


def chunk(kafka: FakeConnector, request_id: str, seq: int, text: str, attempt: int = 1) -> None:
    kafka.chunks.push(chunk_message(ReplyChunk(request_id, "acme", 1, attempt, seq, text)))


def answer(kafka: FakeConnector, request_id: str, text: str | None, outcome: str = "ok") -> None:
    output = None if text is None else Output(text=text)
    kafka.made_consumer.push(reply_message(InferenceReply(request_id, "acme", outcome, output=output)))


def cancelled(kafka: FakeConnector) -> list[str]:
    records = [default_codec().decode(sent.value) for sent in kafka.made_producer.sent]
    return [record.request_id for record in records if isinstance(record, CancelRequest)]
