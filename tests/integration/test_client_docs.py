"""The examples of docs/client.md, run as they stand there, print what stands there; and that of the README runs."""

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from deploy.local.layout import PROJECT_ROOT
from fairlane.names import chunks_topic, dead_letter_replies_topic, replies_topic, requests_topic
from fairlane.records import (
    CancelRequest,
    ConversationTurn,
    InferenceReply,
    InferenceRequest,
    Output,
    PassageReference,
    RetrievalUse,
    TokenUsage,
)
from tests.kit.other_side import OtherSide, create_topics

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 20
README = (PROJECT_ROOT / "README.md").read_text()
DOCUMENT = (PROJECT_ROOT / "docs" / "client.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
LONG = 512
PIECES = ("The capital", " of France", " is Paris.")
GOES_ON = ("The capital", " of Italy", " is Rome.")


class Service:
    """Answers every question with the capital of France, and what comes after an answer with that of Italy; except for
    long ones, which have to be cancelled. What has low priority is refused for now when it comes for the first time."""

    def __init__(self, servers: str, tenant: str) -> None:
        self._servers = servers
        self._tenant = tenant
        self._stopping = threading.Event()
        self._refused: set[str] = set()
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with OtherSide(self._servers, self._tenant) as side:
                while not self._stopping.is_set():
                    match side.poll(0.05):
                        case CancelRequest(request_id):
                            side.reply(request_id, outcome="cancelled")
                        case InferenceRequest() as request:
                            self._answer(side, request)
                        case None:
                            pass
        except Exception as error:  # noqa: BLE001 - looked at by the fixture when the test is over
            self.error = error

    def stop(self) -> None:
        self._stopping.set()

    def _answer(self, side: OtherSide, request: InferenceRequest) -> None:
        if request.priority == "low" and request.request_id not in self._refused:
            self._refused.add(request.request_id)
            refusal = InferenceReply(request.request_id, self._tenant, "rejected", code="overloaded", retry_after_ms=5)
            side.write(refusal)
            return
        long = request.parameters.max_tokens == LONG
        pieces = PIECES if request.conversation_after is None else GOES_ON
        if request.parameters.stream:
            for seq, text in enumerate(("There was",) if long else pieces):
                side.chunk(request.request_id, seq, text)
        if not long:
            output = Output(embeddings=((1.0, 2.0),)) if request.input.texts else Output(text="".join(pieces))
            usage = TokenUsage(prompt_tokens=5, completion_tokens=7)
            reply = InferenceReply(request.request_id, self._tenant, "ok", output=output, usage=usage)
            if request.retrieval is not None:
                name = request.retrieval.collection
                found = (PassageReference(f"{name}/france.md#0", 0.03),)
                reply = replace(reply, passages=found, retrieval_use=RetrievalUse(name, "hybrid"))
            if request.conversation_id is not None:
                reply = replace(reply, turn=ConversationTurn(request.conversation_id, ()))
            side.write(reply, request.reply_to)


@pytest.fixture
def tenant(broker: str, unique: str) -> Iterator[str]:
    create_topics(
        broker,
        requests_topic(unique),
        replies_topic(unique),
        replies_topic(unique, "billing"),
        chunks_topic(unique),
        dead_letter_replies_topic(unique),
    )
    service = Service(broker, unique)
    thread = threading.Thread(target=service.run)
    thread.start()
    yield unique
    service.stop()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert service.error is None


def test_every_example_says_what_it_prints() -> None:
    assert len(EXAMPLES) == DOCUMENT.count("```python")


@pytest.mark.parametrize(("code", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_the_document_says(
    code: str, output: str, broker: str, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", broker)
    assert printed_by(code, tenant) == output


def test_the_example_of_the_readme_runs(broker: str, tenant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", broker)
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert printed_by(code, tenant) == "The capital of France is Paris. 7\n"


def printed_by(code: str, tenant: str) -> str:
    assert 'tenant="acme"' in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace("acme", tenant), "example", "exec"), {})  # noqa: S102 - ours
    return printed.getvalue()
