"""``vllm``: text generation by vLLM, which schedules by itself: items join a running batch and leave it when they are
done.

Prompts become tokens here, by the encoder that the torch engine uses, so that both are safe from control tokens in a
tenant's text in the same way, and count the same.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import AutoTokenizer

from fairlane.outcomes import Code, FinishReason
from fairlane.records import TokenLogprob, TokenUsage
from inference_consumers.engines.continuous import EngineDeath, LoopThread, WaitedRun
from inference_consumers.engines.generated_text import TokenNames, outcome_of_text
from inference_consumers.engines.model_folder import check_model_folder
from inference_consumers.engines.prompts import (
    PromptEncoder,
    TextPrompt,
    has_broken_text,
    prepare_text,
    read_passages_template,
    warm_up_item,
)
from inference_consumers.engines.protocol import (
    NOT_FINITE,
    CancelledItem,
    EngineItem,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    try_once,
)
from inference_consumers.engines.sampling import Logprobs
from inference_consumers.engines.vllm_client import (
    Progress,
    RequestRefusedError,
    VllmStreams,
    start_streams,
)


@dataclass(eq=False, slots=True)
class _TextRequest:
    """One item while it waits or runs. ``request_id`` is vLLM's name of it."""

    request_id: str
    index: int
    item: EngineItem
    prompt: TextPrompt
    observer: RunObserver
    is_added: bool = False
    is_cancelled: bool = False
    completion_tokens: int = 0
    cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)

    def take(self, progress: Progress) -> None:
        self.completion_tokens += len(progress.token_ids)
        self.cached_tokens = max(self.cached_tokens, progress.cached_tokens)
        self.texts.append(progress.text)
        self.logprobs += zip(progress.token_ids, progress.logprobs, strict=False)

    def outcome(self, last: Progress, names: TokenNames) -> ItemOutcome:
        """After everything that came was taken, and ``last`` was the last of it."""
        # The end token and the tokens of a stop string count: each was a step.
        usage = TokenUsage(len(self.prompt.token_ids), self.completion_tokens, self.cached_tokens)
        if last.finish_reason == "abort":
            return CancelledItem(usage)
        if last.finish_reason not in {"length", "stop"}:
            return Failure(Code.ENGINE_ERROR, f"the engine gave up: {last.finish_reason}")
        text = "".join(self.texts)
        return outcome_of_text(
            text,
            usage,
            FinishReason(last.finish_reason),
            self._named_logprobs(len(text), last, names),
            may_be_empty=last.is_stopped_by_text,
            may_be_broken=partial(has_broken_text, self.item),
        )

    def _named_logprobs(self, text_length: int, last: Progress, names: TokenNames) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens that wrote some of the text, or None where they were not asked for."""
        if self.item.parameters.logprobs is None:
            return None
        written = self.logprobs
        if last.is_stopped_by_text:
            starts = itertools.accumulate((len(names.of(token)) for token, _ in written), initial=0)
            written = [one for one, start in zip(written, starts, strict=False) if start < text_length]
        elif last.finish_reason == "stop":
            written = written[:-1]
        return names.logprobs(written)


@dataclass(frozen=True, slots=True)
class _Loaded:
    encoder: PromptEncoder
    names: TokenNames
    thread: LoopThread
    streams: VllmStreams


class VllmEngine:
    """A transformers folder in vLLM, on the device that the installed build of vLLM is for.

    When vLLM dies, items without an outcome get none: ``watch`` reports it, ``run`` and every later call raise
    EngineGoneError with the cause, and the process is to end.
    """

    name = "vllm"

    def __init__(self, spec: EngineSpec, start: Callable[..., Coroutine[Any, Any, Any]] = start_streams) -> None:
        self.limits = spec.limits
        self.fills_device = False
        """Whether it took a part of a GPU for itself, whatever the size of its model."""
        self._spec = spec
        self._start = start
        self._loaded: _Loaded | None = None
        self._ids = itertools.count()
        self._death = EngineDeath()
        # What follows belongs to the loop's thread.
        self._runs: dict[RunObserver, set[_TextRequest]] = {}
        """Batches that joined: their items without an outcome."""
        self._requests: dict[str, set[_TextRequest]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self) -> None:
        spec = self._spec
        check_model_folder(spec)
        template = read_passages_template(spec)
        thread = LoopThread("vllm")
        try:
            tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True, trust_remote_code=False)
            encoder = PromptEncoder(tokenizer, template)
            streams = thread.result_of(
                self._start(spec, partial(self._death.guard, self._pass_on_step), self._death.report)
            )
        except EngineLoadError:
            thread.close()
            raise
        except Exception as error:
            # vLLM raises errors of its own, of the checks of its arguments and of the libraries below.
            thread.close()
            raise spec.error(f"{spec.path} cannot be loaded: {error}") from error
        self._loaded = _Loaded(encoder, TokenNames(tokenizer), thread, streams)
        self.fills_device = streams.fills_device
        try_once(self, [warm_up_item(tokenizer)], spec)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item; other batches may run meanwhile."""
        self._checked()
        waited = WaitedRun(observer, len(batch))
        self.join(batch, waited)
        return waited.wait(self._death.check_alive)

    def join(self, batch: Sequence[EngineItem], observer: RunObserver) -> None:
        """Start on the items at once. The observer is called from one thread, never this one."""
        loaded = self._checked()
        prepared = [prepare_text(item, loaded.encoder, self.limits) for item in batch]
        loaded.thread.post(partial(self._death.guard, partial(self._begin, batch, prepared, observer)))

    def cancel(self, item_ids: Collection[str]) -> None:
        if self._loaded is not None:
            self._loaded.thread.post(partial(self._death.guard, partial(self._stop_items, item_ids)))

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        self._death.watch(on_death)

    def metrics(self) -> str:
        loaded = self._checked()
        return loaded.thread.result_of(loaded.streams.metrics())

    def close(self) -> None:
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            loaded.thread.result_of(self._close(loaded.streams))
            loaded.thread.close()

    def _checked(self) -> _Loaded:
        self._death.check_alive()
        if self._loaded is None:
            raise self._spec.error("not loaded")
        return self._loaded

    # In the loop's thread.

    def _begin(
        self, batch: Sequence[EngineItem], prepared: Sequence[TextPrompt | Failure], observer: RunObserver
    ) -> None:
        requests = self._runs[observer] = set()
        for index, (item, prompt) in enumerate(zip(batch, prepared, strict=True)):
            if isinstance(prompt, Failure):
                observer.finished(index, prompt)
            elif observer.is_cancelled(index):
                observer.finished(index, CancelledItem(TokenUsage()))
            else:
                # Names of our own: an item that is tried again must not meet its former self.
                request = _TextRequest(str(next(self._ids)), index, item, prompt, observer)
                requests.add(request)
                self._requests.setdefault(item.item_id, set()).add(request)
        for request in sorted(requests, key=lambda request: request.index):
            self._spawn(self._answer(request))
        self._report_step(observer)

    async def _answer(self, request: _TextRequest) -> None:
        outcome = await self._outcome_of(request)
        running = self._runs[request.observer]
        running.discard(request)
        others = self._requests[request.item.item_id]
        others.discard(request)
        if not others:
            del self._requests[request.item.item_id]
        request.observer.finished(request.index, outcome)
        if not running:
            self._report_step(request.observer)

    async def _outcome_of(self, request: _TextRequest) -> ItemOutcome:
        assert self._loaded is not None  # noqa: S101 - requests come by join
        streams = self._loaded.streams
        try:
            results = await streams.add(request.request_id, request.prompt, request.item.parameters)
        except RequestRefusedError as error:
            return Failure(Code.ENGINE_ERROR, str(error))
        request.is_added = True
        if request.is_cancelled:
            await streams.abort(request.request_id)
        last = None
        async for progress in results:
            if progress.has_nan:
                await streams.abort(request.request_id)
                return NOT_FINITE
            request.take(progress)
            if progress.finish_reason != "abort" and progress.text and request.item.parameters.stream:
                request.observer.text(request.index, progress.text)
            last = progress
        if last is None:
            raise RuntimeError("an answer ended before it began")
        return request.outcome(last, self._loaded.names)

    def _stop_items(self, item_ids: Collection[str]) -> None:
        for request in itertools.chain.from_iterable(self._requests.get(item_id, ()) for item_id in item_ids):
            self._stop(request)

    def _stop(self, request: _TextRequest) -> None:
        if not request.is_cancelled:
            request.is_cancelled = True
            if request.is_added and self._loaded is not None:
                self._spawn(self._loaded.streams.abort(request.request_id))

    def _pass_on_step(self) -> None:
        for observer, running in tuple(self._runs.items()):
            for request in tuple(running):
                if not request.is_cancelled and observer.is_cancelled(request.index):
                    self._stop(request)
            self._report_step(observer)

    def _report_step(self, observer: RunObserver) -> None:
        if not self._runs[observer]:
            del self._runs[observer]
        observer.step()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.get_running_loop().create_task(self._death.guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, streams: VllmStreams) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        streams.close()
