"""``openai-endpoint``: generate, embed and rank by servers with OpenAI's interface (vLLM, SGLang, llama.cpp, TGI, Ray
Serve, KServe).

With a tokenizer in the model's folder, prompts become tokens here, by the encoder of the local engines: the same
prompt, counted the same, in which text of a tenant is never a control token. Without one the server gets messages and
applies its own chat template to them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import AutoTokenizer

from fairlane.outcomes import Code, Task
from fairlane.records import Message, Output, Parameters, RequestInput, TokenUsage
from fairlane_server.text import estimated_tokens
from inference_consumers.engines.prompts import (
    PassagesTemplate,
    PromptEncoder,
    PromptError,
    is_chat,
    prepare_text,
    prompt_of,
    read_passages_template,
    turns_of,
    wrong_parameters,
)
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineSpec,
    Failure,
    ItemOutcome,
    Success,
    over_allowance,
)
from inference_consumers.engines.remote.connection import EndpointConnection
from inference_consumers.engines.remote.errors import (
    EndpointBusyError,
    EndpointFailedError,
    EndpointUnreachableError,
)
from inference_consumers.engines.remote.openai_messages import (
    EMBEDDINGS,
    MODELS,
    GenerateCall,
    StreamedAnswer,
    embedding_content,
    served_names,
    vectors_of,
)
from inference_consumers.engines.remote.wire import Emit, TextsCall, grouped, texts_call, trial_items

_TOKENIZER = "tokenizer.json"


@dataclass(slots=True)
class _GenerateRequest:
    call: GenerateCall
    answer: StreamedAnswer | None = None

    @property
    def spent(self) -> TokenUsage:
        return TokenUsage() if self.answer is None else self.answer.usage

    async def ask(self, connection: EndpointConnection, began: Callable[[], None], emit: Emit) -> ItemOutcome:
        self.answer = answer = StreamedAnswer(self.call)
        events = connection.events(self.call.path, self.call.content(connection.served_name))
        most_s, now_s = connection.idle_timeout_s, asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(most_s) as idle, contextlib.aclosing(events):
                async for data in events:
                    idle.reschedule(now_s() + most_s)
                    began()
                    if text := answer.take(data):
                        emit(text)
                    if answer.is_done:
                        break
        except (EndpointBusyError, EndpointUnreachableError):
            # Nothing was computed.
            self.answer = None
            raise
        except TimeoutError as error:
            raise EndpointFailedError(f"no part of its answer within {most_s:g} s") from error
        return answer.outcome()


@dataclass(slots=True)
class _VectorsRequest:
    """Vectors of texts; for a ranking their cosines with the first one."""

    call: TextsCall
    max_rows: int
    max_context_tokens: int
    spent: TokenUsage = TokenUsage()  # noqa: RUF009 - frozen

    async def ask(self, connection: EndpointConnection, began: Callable[[], None], emit: Emit) -> ItemOutcome:  # noqa: ARG002 - vectors are no text
        vectors: list[list[float]] = []
        counted = 0
        for texts in grouped(self.call.texts, self.max_rows):
            body = await connection.post(EMBEDDINGS, embedding_content(connection.served_name, texts))
            began()
            estimated, most = self.call.estimated_tokens_of(texts), self.max_context_tokens * len(texts)
            found, tokens = vectors_of(body, len(texts), estimated, most)
            vectors += found
            counted += tokens
        if len({len(vector) for vector in vectors}) != 1:
            raise EndpointFailedError("its vectors differ in length")
        self.spent = TokenUsage(counted)
        if self.call.task == Task.EMBED:
            return Success(Output(embeddings=tuple(map(tuple, vectors))), self.spent)
        rows = np.array(vectors)
        lengths = np.linalg.norm(rows, axis=1)
        if not lengths.all():
            return Failure(Code.ENGINE_ERROR, "the server gave a vector of zeros")
        rows = rows / lengths[:, None]
        return Success(Output(scores=tuple((rows[1:] @ rows[0]).tolist())), self.spent)


class OpenAiWire:
    """Requests to servers with OpenAI's interface."""

    name = "openai-endpoint"
    tasks = frozenset({Task.GENERATE, Task.EMBED, Task.RANK})

    def __init__(self, spec: EngineSpec, max_rows: int) -> None:
        self._spec = spec
        self._max_rows = max_rows
        self._encoder: PromptEncoder | None = None
        self._template = PassagesTemplate()

    def load(self) -> None:
        """Read what the model's folder has of a tokenizer and a template for passages. Raises EngineLoadError."""
        if Task.GENERATE not in self._spec.model.tasks:
            return
        path = self._spec.path
        self._template = read_passages_template(self._spec)
        if not (path / _TOKENIZER).is_file():
            return
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            self._encoder = PromptEncoder(tokenizer, self._template)
        except Exception as error:
            # The libraries below raise errors of many kinds for a damaged file.
            raise self._spec.error(f"{path / _TOKENIZER} cannot be loaded: {error}") from error

    async def check(self, connection: EndpointConnection) -> None:
        if connection.served_name not in served_names(await connection.get(MODELS)):
            raise EndpointFailedError(f"it does not serve {connection.served_name!r}")

    def prepare(self, item: EngineItem) -> _GenerateRequest | _VectorsRequest | Failure:
        if item.task != Task.GENERATE:
            call = texts_call(item)
            most = self._spec.limits.max_context_tokens
            return call if isinstance(call, Failure) else _VectorsRequest(call, self._max_rows, most)
        if self._encoder is not None:
            prompt = prepare_text(item, self._encoder, self._spec.limits)
            if isinstance(prompt, Failure):
                return prompt
            tokens = prompt.token_ids
            most = self._spec.limits.max_context_tokens
            return _GenerateRequest(GenerateCall(item, tokens, len(tokens), most, prompt.max_tokens, prompt.stop))
        call_or_failure = self._messages_call(item)
        return call_or_failure if isinstance(call_or_failure, Failure) else _GenerateRequest(call_or_failure)

    def trials(self) -> Sequence[EngineItem]:
        has_template = self._encoder is None or self._encoder.has_chat_template
        given = RequestInput(messages=(Message("user", "Hello"),)) if has_template else RequestInput(prompt="Hello")
        generate = EngineItem("trial", Task.GENERATE, given, Parameters(max_tokens=4))
        return [generate if item.task == Task.GENERATE else item for item in trial_items(self._spec)]

    def _messages_call(self, item: EngineItem) -> GenerateCall | Failure:
        """With the tokens of its prompt estimated."""
        limits, parameters = self._spec.limits, item.parameters
        if wrong := wrong_parameters(parameters):
            return wrong
        try:
            prompt: str | tuple[Message, ...] = (
                turns_of(item, self._template) if is_chat(item) else prompt_of(item, self._template)
            )
        except PromptError as error:
            return Failure(Code.INVALID, error.message, error.field)
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        tokens = sum(map(estimated_tokens, texts))
        if failure := over_allowance(item, tokens):
            return failure
        room = max(1, min(limits.max_output_tokens, limits.max_context_tokens - tokens))
        stop = tuple(text for text in parameters.stop if text)
        max_tokens = min(parameters.max_tokens or room, limits.max_output_tokens)
        return GenerateCall(item, prompt, tokens, limits.max_context_tokens, max_tokens, stop)
