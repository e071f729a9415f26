"""A KServe server with models of numpy alone; run with the Python of ``.venv-kserve``.

``kserve_server.py PORT CENTROIDS`` serves ``digits``, ``vectors`` and ``pairs``; CENTROIDS is a ``.npy`` of the mean
picture of each label.
"""

import sys
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

DIMENSIONS = 64


class _NumpyModel(Model):  # type: ignore[misc] # kserve is installed in an environment of its own
    output = ""

    def load(self) -> bool:
        self.ready = True
        return True

    def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        inputs = {tensor.name: tensor for tensor in payload.inputs}
        found = self.computed(inputs).astype(np.float32)
        output = InferOutput(self.output, list(found.shape), "FP32", data=found.ravel().tolist())
        return InferResponse(payload.id or "", self.name, [output])

    def computed(self, inputs: dict[str, Any]) -> npt.NDArray[Any]:
        raise NotImplementedError


class Digits(_NumpyModel):
    """The nearest mean picture."""

    output = "logits"

    def __init__(self, name: str, centroids: npt.NDArray[Any]) -> None:
        super().__init__(name)
        self._centroids = centroids

    def computed(self, inputs: dict[str, Any]) -> npt.NDArray[Any]:
        pixels = inputs["pixels"].as_numpy().reshape(inputs["pixels"].shape[0], -1)
        distances: npt.NDArray[Any] = ((pixels[:, None, :] - self._centroids[None]) ** 2).sum(-1)
        return -distances


class Vectors(_NumpyModel):
    """Counts of words by their checksums, of length 1."""

    output = "embedding"

    def computed(self, inputs: dict[str, Any]) -> npt.NDArray[Any]:
        return np.array([_vector(text) for text in _texts(inputs["text"])])


class Pairs(_NumpyModel):
    """The cosine of the vectors of query and document, in a column."""

    output = "score"

    def computed(self, inputs: dict[str, Any]) -> npt.NDArray[Any]:
        pairs = zip(_texts(inputs["query"]), _texts(inputs["document"]), strict=True)
        return np.array([[_vector(query) @ _vector(document)] for query, document in pairs])


def _texts(tensor: Any) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else str(text) for text in tensor.as_numpy().ravel().tolist()]


def _vector(text: str) -> npt.NDArray[Any]:
    found = np.zeros(DIMENSIONS)
    for word in text.lower().split() or [""]:
        found[zlib.crc32(word.encode()) % DIMENSIONS] += 1
    return found / np.linalg.norm(found)


def main() -> None:
    port, file = int(sys.argv[1]), sys.argv[2]
    models = [Digits("digits", np.load(file)), Vectors("vectors"), Pairs("pairs")]
    for model in models:
        model.load()
    ModelServer(http_port=port, enable_grpc=False, workers=1).start(models)


if __name__ == "__main__":
    # KServe reads the command line as well, when it is imported: it takes unknown arguments for none of its business.
    main()
