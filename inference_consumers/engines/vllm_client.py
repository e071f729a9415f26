"""The only module that imports vLLM: its asynchronous engine, with the calls that ours needs.

Written against the version in ``requirements/vllm.txt``. The engine core runs in a process of vLLM's own, so that
scheduling is not slowed down by this process, and dies alone.
"""

import asyncio
import logging
import os
import re
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from fairlane.records import Parameters
from inference_consumers.engines.model_folder import check_memory, weight_bytes
from inference_consumers.engines.prompts import TextPrompt
from inference_consumers.engines.protocol import EngineSpec
from inference_consumers.engines.sampling import Logprobs

_GPU_MEMORY_UTILIZATION = "GPU_MEMORY_UTILIZATION"
"""The environment variable that sets the part of a GPU's memory that weights and cache may take together."""
_DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
_CPU_CACHE_BYTES = 1 << 30
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a request since the last report: a delta if it streams, otherwise everything at the end.

    ``logprobs`` has one entry for each token where they were asked for, and is empty otherwise.
    ``finish_reason`` is vLLM's own: stop, length, abort, error; None while it runs. ``is_stopped_by_text`` is for a
    stop string; any other stop was one of the model's end tokens.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs]
    cached_tokens: int
    has_nan: bool
    finish_reason: str | None
    is_stopped_by_text: bool


class RequestRefusedError(Exception):
    """The engine does not take this request; the others are not touched."""


_QUIET = "ERROR"
"""vLLM warns of a dozen things whenever it loads a model on a CPU, and an operator could change none of them."""

_ENVIRONMENT = {
    # No hub, no reports to the makers, no address but this machine's.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": _QUIET,
    # A fork of a process with threads may hang.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",
    # vLLM's choice on a CPU is to bind its threads to all cores but one, which leaves half of a small machine idle and
    # lets two engines fight for the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What vLLM reads from the environment, in this process and in those that it starts. What an operator set stays."""

_QUIET_LIBRARIES = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Settings of the libraries below, as long as vLLM itself is to be quiet."""


async def start_streams(
    spec: EngineSpec,
    on_iteration: Callable[[], None],
    on_death: Callable[[BaseException], None],
) -> "VllmStreams":
    """Load a model. ``on_iteration`` is called after every step of the engine, when its results were handed out;
    ``on_death`` once, when the engine has ended without having been closed. Raises as ``create_async_llm``."""
    prepare_process()
    loop = asyncio.get_running_loop()
    # Results of a step are handed out before its end is reported.
    engine = create_async_llm(spec, [_iteration_logger(lambda: loop.call_soon(on_iteration))])
    from vllm.platforms import current_platform

    return VllmStreams(engine, on_death, fills_device=not current_platform.is_cpu())


def prepare_process() -> None:
    """Set what vLLM and the libraries below it read from the environment, here and in the processes that it starts.
    Before vLLM is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_LOGGING_LEVEL"] == _QUIET:
        for name, value in _QUIET_LIBRARIES.items():
            os.environ.setdefault(name, value)
        # One warning is logged before vLLM sets its own level.
        logging.getLogger("vllm").setLevel(_QUIET)
        if not sys.warnoptions:
            warnings.simplefilter("ignore")


def create_async_llm(spec: EngineSpec, stat_loggers: Sequence[Callable[..., Any]]) -> Any:
    """vLLM's own engine (AsyncLLM) with a model, and nothing of ours around it but that it ends with this process.

    Raises EngineLoadError for a device that this build of vLLM does not serve or weights that the machine has no memory
    for, and whatever vLLM raises.
    """
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

    from inference_consumers.engines.vllm_executors import tied

    config = _engine_arguments(spec).create_engine_config(UsageContext.ENGINE_CONTEXT)
    executor = tied(Executor.get_class(config))
    return AsyncLLM(config, executor, log_stats=True, log_requests=False, stat_loggers=list(stat_loggers))


def end_async_llm(engine: Any) -> None:
    engine.shutdown(timeout=0)
    # It shuts down once more when it is deleted, and cannot at the end of the interpreter.
    engine.shutdown = lambda: None


def _engine_arguments(spec: EngineSpec) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    if spec.device != "auto" and spec.device.startswith("cpu") != on_cpu:
        raise spec.error(
            f"this build of vLLM runs on {current_platform.device_name}, not on {spec.device}; "
            "`make vllm` installs the one for the CPU, `make vllm VLLM_PACKAGE=vllm` the one for a GPU"
        )
    arguments = arguments_of(spec, on_cpu=on_cpu)
    return AsyncEngineArgs(**arguments, **(_cpu_arguments(spec, arguments["dtype"]) if on_cpu else {}))


def arguments_of(spec: EngineSpec, *, on_cpu: bool) -> dict[str, Any]:
    """AsyncEngineArgs that do not depend on the device. Raises EngineLoadError for an invalid setting."""
    model, path, utilization = spec.model, str(spec.path), os.environ.get(_GPU_MEMORY_UTILIZATION)
    try:
        gpu_memory_utilization = float(utilization) if utilization else _DEFAULT_GPU_MEMORY_UTILIZATION
    except ValueError:
        raise spec.error(f"{_GPU_MEMORY_UTILIZATION} is no number: {utilization!r}") from None
    return {
        "model": path,
        "tokenizer": path,
        "served_model_name": model.model,
        # auto: safetensors if there are any, or else pickles.
        "load_format": "auto" if spec.allow_unsafe_weights else "safetensors",
        "dtype": model.dtype or ("float32" if on_cpu else "auto"),
        "quantization": model.quantization,
        "tensor_parallel_size": model.tensor_parallel_size,
        "max_model_len": model.max_context_tokens,
        "max_num_seqs": model.max_batch_size,
        "enable_prefix_caching": True,
        # Compiling for a CPU takes minutes and a C++ compiler.
        "enforce_eager": on_cpu,
        "gpu_memory_utilization": gpu_memory_utilization,
        "use_tqdm_on_load": False,
    }


def _cpu_arguments(spec: EngineSpec, dtype: str) -> dict[str, Any]:
    import torch

    if spec.model.quantization is None:
        needed = weight_bytes(spec, getattr(torch, dtype).itemsize)
        check_memory(spec, spec.path, needed, torch.device("cpu"))
    # Read by OpenMP in the processes that are started from here.
    if spec.threads > 0:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    arguments: dict[str, Any] = {}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    if spec.model.tensor_parallel_size == 1 and os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind":
        # The worker inside the engine core. vLLM wants it in a third process to set the environment of OpenMP there,
        # which is set already; that process would cost some 10 s of loading.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        arguments["distributed_executor_backend"] = "uni"
    return arguments


def _iteration_logger(on_record: Callable[[], object]) -> Callable[..., Any]:
    """A logger of vLLM's statistics that only reports that some came."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class IterationLogger(StatLoggerBase):  # type: ignore[misc] # vLLM is not installed where types are checked
        def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
            pass

        def record(self, *_: object, **__: object) -> None:
            on_record()

        def log_engine_initialized(self) -> None:
            pass

    return IterationLogger


class _OwnMetrics(Collector):
    """Those of this process that vLLM keeps."""

    def collect(self) -> Iterable[Metric]:
        return (family for family in REGISTRY.collect() if family.name.startswith("vllm:"))


class VllmStreams:
    """An asynchronous text generator by vLLM's AsyncLLM. All calls are made in one event loop.

    ``fills_device``: it has a fixed part of a GPU (``gpu_memory_utilization``).
    """

    def __init__(self, engine: Any, on_death: Callable[[BaseException], None], *, fills_device: bool = False) -> None:
        self.fills_device = fills_device
        self._engine = engine
        self._on_death = on_death
        self._is_closing = False
        # vLLM ends the task that hands out results when its core is gone, also while nothing runs.
        engine.output_handler.add_done_callback(self._handler_ended)

    async def add(self, request_id: str, prompt: TextPrompt, parameters: Parameters) -> AsyncIterator[Progress]:
        """Start a request. Raises RequestRefusedError; anything else, here or from the iterator, is the end of the
        engine."""
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            sampling = _sampling(prompt, parameters)
            results = await self._engine.add_request(request_id, tokens_input(prompt.token_ids), sampling)
        except EngineDeadError:
            raise
        except Exception as error:
            # vLLM checks the parameters here, and turns the request into bytes. It may know the request already.
            await self.abort(request_id)
            raise RequestRefusedError(f"vLLM refuses the request: {type(error).__name__}") from error
        return _progress(results, parameters.logprobs or 0)

    async def abort(self, request_id: str) -> None:
        """Stop a request: its iterator ends with the reason ``abort``."""
        await self._engine.abort(request_id)

    async def metrics(self) -> str:
        """vLLM's metrics in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(_OwnMetrics())
        return generate_latest(registry).decode()

    def close(self) -> None:
        self._is_closing = True
        end_async_llm(self._engine)

    def _handler_ended(self, task: "asyncio.Task[None]") -> None:
        if not self._is_closing:
            from vllm.v1.engine.exceptions import EngineDeadError

            failure = None if task.cancelled() else task.exception()
            self._on_death(failure or EngineDeadError())


def _sampling(prompt: TextPrompt, parameters: Parameters) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=prompt.max_tokens,
        temperature=parameters.temperature,
        top_p=parameters.top_p,
        seed=parameters.seed,
        # No answer contains half a surrogate pair, and it cannot be sent to the engine core.
        stop=[text for text in prompt.stop if not _SURROGATE.search(text)],
        logprobs=parameters.logprobs,
        output_kind=RequestOutputKind.DELTA if parameters.stream else RequestOutputKind.FINAL_ONLY,
    )


async def _progress(results: Any, alternatives: int) -> AsyncIterator[Progress]:
    finish_reason = None
    while finish_reason is None:
        result = results.get_nowait() or await results.get()
        [output] = result.outputs
        finish_reason = output.finish_reason
        found = zip(output.token_ids, output.logprobs or (), strict=False)
        yield Progress(
            text=output.text,
            token_ids=output.token_ids,
            logprobs=[_logprobs(token_id, likeliest, alternatives) for token_id, likeliest in found],
            cached_tokens=result.num_cached_tokens or 0,
            has_nan=result.metrics is not None and result.metrics.is_corrupted,
            finish_reason=finish_reason,
            is_stopped_by_text=isinstance(output.stop_reason, str),
        )


def _logprobs(token_id: int, found: Mapping[int, Any], alternatives: int) -> Logprobs:
    """From vLLM's mapping of token ids: it holds the likeliest, and the chosen one anyhow."""
    ranked = sorted((entry.rank, other, entry.logprob) for other, entry in found.items())
    top = tuple((other, logprob) for rank, other, logprob in ranked if rank <= alternatives)
    return Logprobs(found[token_id].logprob, top)
