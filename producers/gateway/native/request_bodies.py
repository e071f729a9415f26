"""Request bodies of the native API, and the records made from them."""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from fairlane.client.requests import build_request, check_request
from fairlane.names import MOST_REFERENCE_CHARS
from fairlane.outcomes import Code, Task
from fairlane.records import MOST_INPUT_ITEMS, InferenceRequest, Message, Retrieval
from producers.openai_api.errors import GatewayError
from producers.openai_api.request_models import ClosedBody, RetrievalOptions, SchedulingOptions, Stop

_MOST_NUMBER = 2**31 - 1
_LARGEST_INT = 2**63 - 1
_MOST_NAME_CHARS = 128
_MOST_TIMEOUT_MS = 2**53

Name = Annotated[str, Field(min_length=1, max_length=_MOST_NAME_CHARS)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_INPUT_ITEMS)]


def _decoded(value: object) -> object:
    if not isinstance(value, str):
        raise PydanticCustomError("base64", "must be a string of base64")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise PydanticCustomError("base64", "is no base64") from None


Image = Annotated[
    bytes,
    BeforeValidator(_decoded),
    WithJsonSchema(
        {
            "type": "string",
            "contentEncoding": "base64",
            "description": "A PNG, JPEG or WebP file, or raw 8-bit grey pixels of the model's size, row by row.",
        }
    ),
]


class MessageBody(ClosedBody):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class InputBody(ClosedBody):
    """Input of the model; the task decides which fields are required."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_INPUT_ITEMS)] | None = Field(
        None, description="generate: the chat; or `prompt`"
    )
    prompt: str | None = Field(None, description="generate: the text; or `messages`")
    texts: Texts | None = Field(None, description="embed: each gets a vector")
    query: str | None = Field(None, description="rank: what the documents are ranked by")
    documents: Texts | None = Field(None, description="rank: each gets a score")
    image: Image | None = Field(None, description="classify: the picture")


class ParametersBody(ClosedBody):
    """Generation parameters, for task generate."""

    max_tokens: int | None = Field(None, ge=1, le=_MOST_NUMBER, description="Most tokens of the answer")
    temperature: float = Field(0.0, ge=0, le=2, description="0 is greedy decoding")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling")
    stop: Stop = Field(default_factory=list, description="Texts at which the answer ends")
    seed: int | None = Field(None, ge=0, le=_LARGEST_INT, description="Makes sampling repeatable")
    stream: bool = Field(False, description="Tell the text as it is made, in the request's events")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives to report at each position")


class _Scheduled(SchedulingOptions):
    """Fields of every request."""

    model: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MOST_REFERENCE_CHARS,
            description="Name of the model, or `model/version` or `model@alias`",
        ),
    ]
    timeout_ms: int | None = Field(
        None, ge=1, le=_MOST_TIMEOUT_MS, description="The deadline, from its receipt; none: the service's own"
    )
    metadata: dict[str, str] = Field(default_factory=dict, description="Kept with the request's records")

    def _built(self, tenant: str, request_id: str, task: Task, **fields: Any) -> InferenceRequest:
        try:
            request = build_request(
                request_id=request_id,
                model=self.model,
                task=task,
                metadata=self.metadata,
                **{name: getattr(self, name) for name in SchedulingOptions.model_fields},
                **fields,
            )
            check_request(request, tenant)
        except ValueError as error:
            # The text begins with the field and quotes no input.
            name, _, message = str(error).partition(": ")
            field = self._field(name) if message else None
            raise GatewayError(400, Code.INVALID, message or name, field=field) from None
        return request

    def _field(self, name: str) -> str:
        """Path in this body of a field of the client."""
        return name


class NewRequest(_Scheduled):
    """A request of any task."""

    task: Literal["generate", "embed", "rank", "classify"] = Field("generate", description="What the model is to do")
    input: InputBody
    parameters: ParametersBody = Field(default_factory=ParametersBody)
    retrieval: RetrievalOptions | None = Field(None, description="generate: answer from a collection's passages")
    conversation_id: Name | None = Field(
        None, description="generate: the conversation it goes on with; the input is what is new"
    )
    conversation_after: str | None = Field(
        None, description="With it: the request id of the turn that was seen last; the answer knows it"
    )

    def _field(self, name: str) -> str:
        if name in InputBody.model_fields:
            return f"input.{name}"
        return f"parameters.{name}" if name in ParametersBody.model_fields else name

    def to_request(self, tenant: str, request_id: str) -> InferenceRequest:
        """The record made from this body. Raises GatewayError: 400."""
        if self.parameters.stream and self.task != "generate":
            raise GatewayError(400, Code.INVALID, "is for task generate alone", field="parameters.stream")
        fields = vars(self.input) | vars(self.parameters)
        if self.input.messages is not None:
            fields["messages"] = [Message(message.role, message.content) for message in self.input.messages]
        retrieval = self.retrieval
        return self._built(
            tenant,
            request_id,
            Task(self.task),
            retrieval=None if retrieval is None else Retrieval(retrieval.collection, retrieval.top_k, retrieval.mode),
            conversation_id=self.conversation_id,
            conversation_after=self.conversation_after,
            **fields,
        )


class RankRequest(_Scheduled):
    """Documents to be ranked by a query."""

    query: str = Field(min_length=1)
    documents: Texts
    top_n: int | None = Field(None, ge=1, le=MOST_INPUT_ITEMS, description="Tell of the best so many alone")

    def to_request(self, tenant: str, request_id: str) -> InferenceRequest:
        """The record made from this body. Raises GatewayError: 400."""
        return self._built(tenant, request_id, Task.RANK, query=self.query, documents=self.documents)


class ClassifyRequest(_Scheduled):
    """An image to be classified."""

    image: Image
    top_n: int | None = Field(None, ge=1, le=MOST_INPUT_ITEMS, description="Tell of the best so many alone")

    def to_request(self, tenant: str, request_id: str) -> InferenceRequest:
        """The record made from this body. Raises GatewayError: 400."""
        return self._built(tenant, request_id, Task.CLASSIFY, image=self.image)
