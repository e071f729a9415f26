"""``v2-endpoint``: classify, embed and rank by servers of the Open Inference Protocol, version 2, over REST (Triton,
KServe, TorchServe, MLServer, OpenVINO).

=========  ==================================================  ================================================
task       tensors of the request                              tensor of the answer
=========  ==================================================  ================================================
classify   ``pixels`` FP32 (1, channels, height, width) in      ``logits`` or ``probabilities`` (1, labels)
           0..1                                                or (labels)
embed      ``text`` BYTES (n)                                   ``embedding`` (n, dimensions)
rank       ``query`` BYTES (n), the same n times, and           ``score`` (n) or (n, 1)
           ``document`` BYTES (n)
=========  ==================================================  ================================================

Numbers of an answer may have any type of floating point; its data may be flat or nested, and its shape must be that of
the table. Other names of tensors are in ``tensors`` of the endpoints file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt

from fairlane.outcomes import Code, Task
from fairlane.records import LabelScore, Output, Parameters, RequestInput, TokenUsage
from inference_consumers.engines.images import ImageError, PixelFormat, pixels_of
from inference_consumers.engines.picture_labels import read_picture_labels
from inference_consumers.engines.protocol import NOT_FINITE, EngineItem, EngineSpec, Failure, ItemOutcome, Success
from inference_consumers.engines.remote.connection import EndpointConnection
from inference_consumers.engines.remote.errors import (
    UNREADABLE,
    EndpointFailedError,
    ItemRefusedError,
    unreadable_numbers,
)
from inference_consumers.engines.remote.wire import Emit, TextsCall, grouped, texts_call, trial_items

_DESCRIPTION = "model.json"
_FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
_NUMBERS = "iufO"
"""Kinds of numpy's arrays. Objects are numbers with a null among them, which stands for one that is not finite."""

_Floats = npt.NDArray[np.float64]


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]


class _Inferred(msgspec.Struct):
    outputs: list[_Tensor]


_inferred = msgspec.json.Decoder(_Inferred)


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Names at the server by ours."""

    names: Mapping[str, str]

    def of(self, name: str) -> str:
        return self.names.get(name, name)

    def text(self, name: str, texts: Sequence[str]) -> dict[str, Any]:
        return {"name": self.of(name), "shape": [len(texts)], "datatype": "BYTES", "data": texts}

    def found(self, body: bytes, *names: str) -> tuple[str, _Floats]:
        """The first of these tensors that an answer has. Raises EndpointFailedError, and ItemRefusedError for numbers
        that are not finite."""
        try:
            outputs = {tensor.name: tensor for tensor in _inferred.decode(body).outputs}
        except UNREADABLE as error:
            raise unreadable_numbers(body, "its answer is not what the Open Inference Protocol answers") from error
        for name in names:
            if (tensor := outputs.get(self.of(name))) is not None:
                return name, _floats(tensor, name)
        raise EndpointFailedError(f"its answer has no tensor {' or '.join(map(self.of, names))}")


def _floats(tensor: _Tensor, name: str) -> _Floats:
    if tensor.datatype not in _FLOATS:
        raise EndpointFailedError(f"the tensor {name} of its answer has no numbers of floating point")
    has_other_data = EndpointFailedError(f"the tensor {name} of its answer has other data than numbers")
    try:
        given = np.array(tensor.data)
        if given.dtype.kind not in _NUMBERS:
            # Numpy would read a text as a number.
            raise has_other_data
        found = given.astype(np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise has_other_data from error
    if not np.isfinite(found).all():
        raise ItemRefusedError(NOT_FINITE)
    has_other_shape = EndpointFailedError(f"the tensor {name} of its answer has not the shape that it states")
    if any(side < 0 for side in tensor.shape):
        raise has_other_shape
    try:
        return found.reshape(tensor.shape)
    except (ValueError, OverflowError) as error:
        # Other sides, more than arrays can have, or one too long for an index beside one of 0.
        raise has_other_shape from error


async def _infer(connection: EndpointConnection, inputs: Sequence[Mapping[str, Any]]) -> bytes:
    return await connection.post(f"{_path_of(connection)}/infer", msgspec.json.encode({"inputs": inputs}))


def _path_of(connection: EndpointConnection) -> str:
    version = connection.endpoint.served_version
    path = f"/v2/models/{quote(connection.served_name, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


@dataclass(slots=True)
class _PictureRequest:
    pixels: bytes
    format: PixelFormat
    labels: tuple[str, ...]
    tensors: _Tensors
    spent: TokenUsage = TokenUsage()  # noqa: RUF009 - frozen

    async def ask(self, connection: EndpointConnection, began: Callable[[], None], emit: Emit) -> ItemOutcome:  # noqa: ARG002 - labels are no text
        wanted = self.format
        # The bytes are pixel by pixel; a model takes one plane for each colour.
        pixels = np.frombuffer(self.pixels, np.uint8).reshape(wanted.height, wanted.width, wanted.channels)
        planes = (pixels.transpose(2, 0, 1).astype(np.float32) / 255).ravel()
        shape = [1, wanted.channels, wanted.height, wanted.width]
        tensor = {"name": self.tensors.of("pixels"), "shape": shape, "datatype": "FP32", "data": planes.tolist()}
        body = await _infer(connection, (tensor,))
        began()
        name, found = self.tensors.found(body, "probabilities", "logits")
        if found.shape not in ((len(self.labels),), (1, len(self.labels))):
            raise EndpointFailedError(f"the tensor {name} of its answer has another shape than a number for each label")
        scores = found.ravel()
        if name == "logits":
            scores = np.exp(scores - scores.max())
            scores /= scores.sum()
        order = np.argsort(-scores, kind="stable").tolist()
        return Success(Output(labels=tuple(LabelScore(self.labels[at], float(scores[at])) for at in order)), self.spent)


@dataclass(slots=True)
class _TextsRequest:
    """Its tokens are estimated: the protocol counts none."""

    call: TextsCall
    tensors: _Tensors
    max_rows: int
    spent: TokenUsage = TokenUsage()  # noqa: RUF009 - frozen

    async def ask(self, connection: EndpointConnection, began: Callable[[], None], emit: Emit) -> ItemOutcome:  # noqa: ARG002 - vectors are no text
        is_ranking = self.call.task == Task.RANK
        query, texts = self.call.texts[0], self.call.texts[1:] if is_ranking else self.call.texts
        rows: list[_Floats] = []
        for group in grouped(texts, self.max_rows):
            if is_ranking:
                repeated = self.tensors.text("query", [query] * len(group))
                body = await _infer(connection, (repeated, self.tensors.text("document", group)))
            else:
                body = await _infer(connection, (self.tensors.text("text", group),))
            began()
            _, found = self.tensors.found(body, "score" if is_ranking else "embedding")
            if is_ranking and found.ndim == 1:
                found = found[:, None]
            is_row_each = found.ndim == 2 and found.size and len(found) == len(group)
            if not is_row_each or (is_ranking and found.shape[1] != 1):
                raise EndpointFailedError("its answer does not have one row for each text")
            rows.append(found)
        self.spent = TokenUsage(self.call.estimated_tokens_of(self.call.texts))
        if len({row.shape[1] for row in rows}) != 1:
            raise EndpointFailedError("its vectors differ in length")
        numbers = np.concatenate(rows)
        if is_ranking:
            return Success(Output(scores=tuple(numbers[:, 0].tolist())), self.spent)
        return Success(Output(embeddings=tuple(map(tuple, numbers.tolist()))), self.spent)


class V2Wire:
    """Requests to servers of the Open Inference Protocol."""

    name = "v2-endpoint"
    tasks = frozenset({Task.CLASSIFY, Task.EMBED, Task.RANK})

    def __init__(self, spec: EngineSpec, max_rows: int, tensors: Mapping[str, str]) -> None:
        self._spec = spec
        self._max_rows = max_rows
        self._tensors = _Tensors(tensors)
        self._pictures: tuple[tuple[str, ...], PixelFormat] | None = None

    def load(self) -> None:
        """For classify read the labels and the size of pictures from the model's folder. Raises EngineLoadError."""
        if Task.CLASSIFY in self._spec.model.tasks:
            file = self._spec.path / _DESCRIPTION
            if not file.is_file():
                raise self._spec.error(f"{file} is missing: it has the labels and the size of pictures")
            self._pictures = read_picture_labels(self._spec, file)

    async def check(self, connection: EndpointConnection) -> None:
        await connection.get("/v2/health/ready")
        await connection.get(f"{_path_of(connection)}/ready")

    def prepare(self, item: EngineItem) -> _PictureRequest | _TextsRequest | Failure:
        if item.task != Task.CLASSIFY:
            call = texts_call(item)
            return call if isinstance(call, Failure) else _TextsRequest(call, self._tensors, self._max_rows)
        assert self._pictures is not None  # noqa: S101 - loaded where the model classifies
        labels, format_ = self._pictures
        try:
            pixels = pixels_of(item.input.image or b"", format_)
        except ImageError as error:
            return Failure(Code.INVALID, str(error), "input.image")
        return _PictureRequest(pixels, format_, labels, self._tensors)

    def trials(self) -> Sequence[EngineItem]:
        black = bytes(self._pictures[1].size_bytes) if self._pictures is not None else b""
        picture = EngineItem("trial", Task.CLASSIFY, RequestInput(image=black), Parameters())
        return [picture if item.task == Task.CLASSIFY else item for item in trial_items(self._spec)]
