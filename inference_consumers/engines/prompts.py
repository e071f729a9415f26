"""From a request to prompt tokens, so that text from a tenant is never read as a control token."""

import copy
import re
import secrets
from collections.abc import Sequence

from jinja2 import TemplateError
from transformers import AddedToken, PreTrainedTokenizerBase

from fairlane.records import Message
from fairlane_server.text import clean_text
from inference_consumers.engines.detokenizer import REPLACEMENT
from inference_consumers.engines.passages import PassagesTemplate
from inference_consumers.engines.protocol import EngineItem

_SYSTEM = "system"
_SPOKEN = frozenset({"user", "assistant"})
_ROLES = _SPOKEN | {_SYSTEM}
_CONVERSATION = "conversation_id"


class PromptError(Exception):
    """The item has no prompt this model can be given; ``field`` names what is wrong."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class PromptEncoder:
    """Turns messages (through the model's chat template) or a plain prompt into token ids.

    Control tokens are those that the tokenizer calls special, and those that the chat template writes. They come from
    the template alone: in every text of a request, of what was said before it, and in the passages, their names are
    ordinary characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, passages: PassagesTemplate | None = None) -> None:
        """``passages`` says how passages stand in the prompt."""
        self._tokenizer = _with_control_tokens(tokenizer)
        self._passages = passages or PassagesTemplate()
        self._control_ids: dict[str, int] = {
            token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        self._control_id_set = frozenset(self._control_ids.values())
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def encode(self, item: EngineItem) -> list[int]:
        """Prompt token ids, at least one. Raises PromptError."""
        context = self._passages.render(item.passages) if item.passages else ""
        history = _said(item)
        if item.input.messages:
            own = _with_context(self._checked(item.input.messages), context)
            ids = self._encode_messages(_with_history(own, history), "input.messages")
        elif item.input.prompt and (history or item.is_turn):
            if not self._tokenizer.chat_template:
                raise PromptError("this model has no chat template: it cannot go on a conversation", _CONVERSATION)
            asked = _with_context((Message("user", item.input.prompt),), context)
            ids = self._encode_messages((*history, *asked), _CONVERSATION)
        elif item.input.prompt:
            prompt = clean_text(item.input.prompt)
            if context:
                prompt = f"{context}\n\n{prompt}"
            ids = self._plain(prompt, add_special_tokens=True)
        else:
            raise PromptError("neither messages nor a prompt", "input")
        if self._control_id_set.issuperset(ids):
            raise PromptError("the prompt has no tokens but control tokens", "input")
        return ids

    def _checked(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not self._tokenizer.chat_template:
            raise PromptError("this model has no chat template: send a prompt instead", "input.messages")
        for index, message in enumerate(messages):
            if message.role not in _ROLES:
                raise PromptError(f"unknown role {message.role!r}", f"input.messages[{index}].role")
        return messages

    def _encode_messages(self, messages: Sequence[Message], field: str) -> list[int]:
        # The template sees a placeholder for each content; the contents are put in afterwards, as plain text.
        nonce = secrets.token_hex(8)
        turns = [{"role": message.role, "content": f"[{nonce}:{index}]"} for index, message in enumerate(messages)]
        try:
            rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise PromptError(f"the chat template refuses the messages: {error}", field) from error
        ids: list[int] = []
        text = ""
        for position, piece in enumerate(re.split(rf"\[{nonce}:(\d+)\]", rendered)):
            if position % 2:
                text += clean_text(messages[int(piece)].content)
                continue
            for part in self._control.split(piece) if self._control else [piece]:
                if part in self._control_ids:
                    ids += self._plain(text)
                    ids.append(self._control_ids[part])
                    text = ""
                else:
                    text += part
        return ids + self._plain(text)

    def _plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of text in which the names of control tokens are ordinary characters."""
        if not text:
            return []
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False)
        return list(encoded["input_ids"])


def has_broken_text(item: EngineItem) -> bool:
    """Whether a replacement character stands in the prompt, sent as such or put in for what was no character."""
    messages = (*_said(item), *(item.input.messages or ()))
    texts = (item.input.prompt or "", *(message.content for message in messages))
    passages = (passage.text for passage in item.passages)
    return any(REPLACEMENT in clean_text(text) for text in (*texts, *passages))


def _with_control_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer; or a copy where tokens count as special that its chat template writes and that it calls ordinary
    additions (``<tool_call>`` of some models): those it would find in any text."""
    template = str(tokenizer.chat_template or "")
    written = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if not token.special and token.content.strip() and token.content in template
    ]
    if not written:
        return tokenizer
    own = copy.deepcopy(tokenizer)
    own.add_tokens([AddedToken(content, special=True, normalized=False) for content in written], special_tokens=True)
    return own


def _said(item: EngineItem) -> tuple[Message, ...]:
    """What was said before. Nothing from there gives orders: whatever is neither the user's nor the model's own does
    not belong there."""
    return tuple(message for message in item.history if message.role in _SPOKEN)


def _with_history(messages: tuple[Message, ...], history: tuple[Message, ...]) -> tuple[Message, ...]:
    """What was said before between the system messages that the request begins with and what it adds."""
    first = next((index for index, message in enumerate(messages) if message.role != _SYSTEM), len(messages))
    return (*messages[:first], *history, *messages[first:])


def _with_context(messages: tuple[Message, ...], context: str) -> tuple[Message, ...]:
    """The context before the last message of the user: what stands there has no more authority than the user."""
    if not context:
        return messages
    for index in reversed(range(len(messages))):
        if messages[index].role == "user":
            asked = Message("user", f"{context}\n\n{messages[index].content}")
            return (*messages[:index], asked, *messages[index + 1 :])
    return (*messages, Message("user", context))
