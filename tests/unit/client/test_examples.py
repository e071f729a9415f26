"""The examples in the docstrings of the client, run as they stand there, print what stands there."""

import doctest
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest

import fairlane
from fairlane.client import Client, base, new_request_id
from fairlane.client import __path__ as client_folders
from fairlane.client.connector import KafkaHeaders
from fairlane.records import (
    CancelRequest,
    ConversationTurn,
    InferenceReply,
    InferenceRequest,
    LabelScore,
    Output,
    TokenUsage,
)
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from tests.kit.client_fakes import DeliveryReport, FakeConnector, FakeConsumer, FakeProducer, reply_message

NAMES = ("fairlane", *(found.name for found in pkgutil.iter_modules(client_folders, "fairlane.client.")))
EXAMPLES = [
    found
    for name in NAMES
    for found in doctest.DocTestFinder(exclude_empty=True).find(import_module(name), name)
    if found.examples
]
ANSWERS = {
    "The capital of France is": " Paris.",
    "What is the capital of France?": "The capital of France is Paris.",
    "And of Italy?": "The capital of Italy is Rome.",
    "2 + 2 = ?": "4",
}
UNANSWERED = "Once upon a time"


class AnsweringProducer(FakeProducer):
    """All that is published is in the log and answered at once, but for one prompt, which has to be cancelled."""

    def __init__(self, replies: FakeConsumer) -> None:
        super().__init__()
        self.acknowledge_at_once = True
        self._replies = replies

    def produce(  # type: ignore[override]  # as the client calls it
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None:
        super().produce(topic, value, key, headers=headers, on_delivery=on_delivery)
        match default_codec().decode(value):
            case CancelRequest(request_id):
                self._replies.push(reply_message(InferenceReply(request_id, "acme", "cancelled")))
            case InferenceRequest() as request if request.input.prompt != UNANSWERED:
                self._replies.push(reply_message(answer_to(request)))


def answer_to(request: InferenceRequest) -> InferenceReply:
    given = request.input
    if given.texts is not None:
        output = Output(embeddings=tuple((1.0, 2.0) for _ in given.texts))
    elif given.image is not None:
        output = Output(labels=(LabelScore("7", 0.9),))
    else:
        asked = given.prompt if given.messages is None else given.messages[-1].content
        assert isinstance(asked, str)
        output = Output(text=ANSWERS[asked])
    usage = TokenUsage(completion_tokens=2)
    reply = InferenceReply(request.request_id, "acme", "ok", output=output, usage=usage)
    if request.conversation_id is None:
        return reply
    return replace(reply, turn=ConversationTurn(request.conversation_id, ()))


def connector(_settings: KafkaSettings) -> FakeConnector:
    made = FakeConnector()
    made.made_producer = AnsweringProducer(made.made_consumer)
    return made


class Checker(doctest.OutputChecker):
    """White space at the ends is nothing: an answer may begin with it, and need not end a line."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want.strip(), got.strip(), optionflags)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """What an example may use besides what it makes itself: all that is public, a client and a handle of it."""
    monkeypatch.setattr(base, "KafkaConnector", connector)
    public: dict[str, object] = {name: getattr(fairlane, name) for name in fairlane.__all__}
    with Client("acme") as client:
        handle = client.submit(model="m", prompt=UNANSWERED)
        yield public | {"client": client, "handle": handle, "new_request_id": new_request_id, "png": b"an image"}


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_an_example_prints_what_its_docstring_says(example: doctest.DocTest, names: dict[str, object]) -> None:
    example.globs = names
    said: list[str] = []
    runner = doctest.DocTestRunner(Checker(), verbose=False)
    runner.run(example, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)


def test_examples_are_found_where_they_are() -> None:
    found = {example.name for example in EXAMPLES}
    assert {"fairlane", "fairlane.client.sync.Client.map", "fairlane.client.text_stream.TextStream"} <= found
