"""The texts of a work item and of an answer that are checked. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fairlane.records import Message, Output, RequestInput, WorkItem
from inference_consumers.engines.protocol import Success

_SYSTEM = "system"


def input_texts(item: WorkItem) -> tuple[str, ...]:
    """Every text that reaches the model or goes along with it: history, passages, the whole input, stop strings, and
    the metadata's names and values. Images are not text."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    _mapped(item, note)
    return tuple(texts)


def with_input_texts(item: WorkItem, texts: Sequence[str]) -> WorkItem:
    """The item with these in place of ``input_texts``; the item itself if they are the same."""
    if tuple(texts) == input_texts(item):
        return item
    left = iter(texts)
    return _mapped(item, lambda _: next(left))


def system_prompt(item: WorkItem) -> str:
    """The system messages of the request, as one text."""
    said = (*item.history, *(item.request.input.messages or ()))
    return "\n".join(message.content for message in said if message.role == _SYSTEM)


def with_output_text(answer: Success, text: str) -> Success:
    """The answer with this text. Log probabilities spell the old text out, token by token: they are left out."""
    if text == answer.output.text:
        return answer
    return Success(Output(text=text), answer.usage, answer.finish_reason)


def _mapped(item: WorkItem, change: Callable[[str], str]) -> WorkItem:
    """The item with every text changed, in a fixed order."""
    history = tuple(Message(one.role, change(one.content)) for one in item.history)
    passages = tuple(replace(one, text=change(one.text)) for one in item.passages)
    request = item.request
    changed = replace(
        request,
        input=_input(request.input, change),
        parameters=replace(request.parameters, stop=tuple(map(change, request.parameters.stop))),
        metadata={change(name): change(value) for name, value in request.metadata.items()},
    )
    return replace(item, request=changed, passages=passages, history=history)


def _input(given: RequestInput, change: Callable[[str], str]) -> RequestInput:
    messages = given.messages
    return RequestInput(
        messages=None if messages is None else tuple(Message(one.role, change(one.content)) for one in messages),
        prompt=None if given.prompt is None else change(given.prompt),
        texts=None if given.texts is None else tuple(map(change, given.texts)),
        query=None if given.query is None else change(given.query),
        documents=None if given.documents is None else tuple(map(change, given.documents)),
        image=given.image,
    )
