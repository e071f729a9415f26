"""Baseline of pipeline-efficiency: vLLM's asynchronous engine alone, in a process of its environment.

``python -m benchmarks.vllm_direct MODEL_JSON MODELS_DIR``, started by :class:`DirectVllm`, loads a model and answers
lines of requests with lines of :class:`Took`. All requests of a line are given to vLLM at once; the clock runs while it
works, after their prompts were tokenized.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from fairlane.closing import Closing
from fairlane.records import InferenceRequest, ModelVersion
from fairlane_server.processes.parent import die_with_parent
from inference_consumers.engines.prompts import PromptEncoder, TextPrompt, prepare_text
from inference_consumers.engines.protocol import EngineItem, EngineSpec, Failure
from inference_consumers.engines.vllm_client import (
    create_async_llm,
    end_async_llm,
    prepare_process,
)

_ROOT = Path(__file__).resolve().parents[1]
_END_TIMEOUT_S = 20.0


class VllmMissingError(Exception):
    """There is no environment of vLLM."""


class Took(msgspec.Struct, frozen=True):
    """So long, for so many tokens of answers. The first line of a process is one of zeros: the model is loaded."""

    seconds: float = 0.0
    completion_tokens: int = 0


def check_python(python: Path) -> None:
    """Raises VllmMissingError, with the remedy, when this file does not exist."""
    if not python.exists():
        raise VllmMissingError(f"{python} is missing: run `make vllm`, or set SKIP_VLLM=1 to leave vLLM out")


class DirectVllm(Closing):
    """The process. It loads while others start: ``wait_loaded`` before the first ``answer``."""

    def __init__(self, python: Path, model: ModelVersion, models_dir: Path) -> None:
        """Raises VllmMissingError."""
        check_python(python)
        self._process = subprocess.Popen(
            [python.absolute(), "-m", __spec__.name, msgspec.json.encode(model).decode(), str(models_dir.absolute())],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def close(self) -> None:
        self._requests.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def wait_loaded(self) -> None:
        """Raises RuntimeError when it ends instead; why is on the standard error."""
        self._read()

    def answer(self, requests: Sequence[InferenceRequest]) -> Took:
        """All of them at once, to the last answer."""
        self._requests.write(msgspec.json.encode(requests) + b"\n")
        self._requests.flush()
        return self._read()

    def _read(self) -> Took:
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with {self._process.wait(_END_TIMEOUT_S)}")
        return msgspec.json.decode(line, type=Took)


def main(model_json: str, models_dir: str) -> None:
    """Serve the standard input until it ends."""
    die_with_parent(signal.SIGKILL)
    # What libraries print belongs among the errors.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(_serve(msgspec.json.decode(model_json, type=ModelVersion), Path(models_dir), answers))


async def _serve(model: ModelVersion, models_dir: Path, answers: Any) -> None:
    spec = EngineSpec(model, str(models_dir))
    prepare_process()
    from transformers import AutoTokenizer

    encoder = PromptEncoder(AutoTokenizer.from_pretrained(spec.path, local_files_only=True))
    engine = create_async_llm(spec, ())
    try:
        answers.write(msgspec.json.encode(Took()) + b"\n")
        answers.flush()
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            requests = msgspec.json.decode(line, type=list[InferenceRequest])
            prompts = []
            for request in requests:
                item = EngineItem(request.request_id, request.task, request.input, request.parameters)
                prompt = prepare_text(item, encoder, spec.limits)
                if isinstance(prompt, Failure):
                    raise TypeError(prompt.message)
                prompts.append(prompt)
            answers.write(msgspec.json.encode(await _answer(engine, prompts)) + b"\n")
            answers.flush()
    finally:
        end_async_llm(engine)


async def _answer(engine: Any, prompts: Sequence[TextPrompt]) -> Took:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def tokens(name: str, prompt: TextPrompt) -> int:
        kind = RequestOutputKind.FINAL_ONLY
        sampling = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, output_kind=kind)
        [answer] = [one async for one in engine.generate(tokens_input(prompt.token_ids), sampling, name)]
        return len(answer.outputs[0].token_ids)

    started = perf_counter()
    counts = await asyncio.gather(*(tokens(str(number), one) for number, one in enumerate(prompts)))
    return Took(perf_counter() - started, sum(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
