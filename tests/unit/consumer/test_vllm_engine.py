"""The vLLM engine on streams that a test writes: what becomes of every item, whatever vLLM does."""

import asyncio
import json
import queue
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Output, Parameters, Passage, RequestInput, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engine_process.failures import is_end_of_engine, name_of_end
from inference_consumers.engines.prompts import PassagesTemplate, PromptEncoder, TextPrompt
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineGoneError,
    EngineItem,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    Outcomes,
    Success,
    run_batch,
)
from inference_consumers.engines.sampling import Logprobs
from inference_consumers.engines.vllm_client import Progress, RequestRefusedError
from inference_consumers.engines.vllm_engine import VllmEngine
from tests.kit.engine_specs import spec_of
from tests.kit.waiting import eventually

LIMITS = EngineLimits(max_batch_size=4, max_batch_tokens=64, max_context_tokens=16, max_output_tokens=8)
WORDS = ("a", "b", "c", "d", "<end>")
END = WORDS.index("<end>")


def progress(text: str = "", *tokens: int, finish: str | None = None, **others: Any) -> Progress:
    plain = Progress(text, tokens, (), 0, has_nan=False, finish_reason=finish, is_stopped_by_text=False)
    return replace(plain, **others)


WARM = progress("a", 0, finish="length")


@dataclass
class Request:
    """One that vLLM was given."""

    request_id: str
    prompt: TextPrompt
    results: "asyncio.Queue[Progress | Exception]" = field(default_factory=asyncio.Queue)


class ScriptedStreams:
    """Takes requests and hands out what the test says. The first one, the warm-up, is answered at once."""

    fills_device = False

    def __init__(
        self,
        on_iteration: Callable[[], None],
        on_death: Callable[[BaseException], None],
        warm_up: Progress | Exception = WARM,
    ) -> None:
        self._warm_up = warm_up
        self._loop = asyncio.get_running_loop()
        self._on_iteration = on_iteration
        self.on_death = on_death
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.refuses = False
        self.holds_back: asyncio.Event | None = None
        self.is_closed = False

    async def add(self, request_id: str, prompt: TextPrompt, parameters: Parameters) -> AsyncIterator[Progress]:
        request = Request(request_id, prompt)
        if not self.requests:
            request.results.put_nowait(self._warm_up)
        self.requests.append(request)
        if self.holds_back is not None:
            await self.holds_back.wait()
        if self.refuses:
            raise RequestRefusedError("vLLM refuses the request: Reason")
        return self._results(request)

    async def _results(self, request: Request) -> AsyncIterator[Progress]:
        is_last = False
        while not is_last:
            result = await request.results.get()
            if isinstance(result, Exception):
                raise result
            is_last = result.finish_reason is not None
            yield result

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        [request] = [request for request in self.requests if request.request_id == request_id]
        # vLLM lets go of what it held back for a stop string.
        request.results.put_nowait(progress(" held", finish="abort"))

    async def metrics(self) -> str:
        return "vllm:nothing 0\n"

    def close(self) -> None:
        self.is_closed = True

    # From the test's thread.

    def say(self, number: int, *results: Progress | Exception) -> None:
        """What comes of the request with this number after the warm-up."""
        eventually(lambda: len(self.requests) > number + 1, what="the request")
        for result in results:
            self._loop.call_soon_threadsafe(self.requests[number + 1].results.put_nowait, result)

    def iterate(self) -> None:
        self._loop.call_soon_threadsafe(self._on_iteration)

    def post(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five words."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="d"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
    save_file({"weight": np.zeros(1, np.float32)}, path / "model.safetensors")
    return path


@dataclass
class Bench:
    engine: VllmEngine
    streams: ScriptedStreams


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    made: list[ScriptedStreams] = []

    async def start(
        spec: EngineSpec, on_iteration: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> ScriptedStreams:
        made.append(ScriptedStreams(on_iteration, on_death))
        return made[0]

    engine = VllmEngine(spec_of(folder, LIMITS, "words"), start)
    engine.load()
    yield Bench(engine, made[0])
    engine.close()
    assert made[0].is_closed


def item(prompt: str = "a b", item_id: str = "item", **parameters: Any) -> EngineItem:
    return EngineItem(item_id, "generate", RequestInput(prompt=prompt), replace(Parameters(max_tokens=4), **parameters))


def joined(bench: Bench, *items: EngineItem) -> Outcomes:
    outcomes = Outcomes()
    bench.engine.join(items, outcomes)
    return outcomes


def wait_for(outcomes: Outcomes, *indexes: int) -> None:
    eventually(lambda: set(indexes) <= outcomes.by_index.keys(), what=f"the outcomes of {indexes}")


def usage(completion_tokens: int, cached_tokens: int = 0) -> TokenUsage:
    return TokenUsage(prompt_tokens=2, completion_tokens=completion_tokens, cached_tokens=cached_tokens)


def _output(text: str, **others: Any) -> Output:
    return Output(text=text, **others)


@contextmanager
def _thread(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join(10)


def test_an_item_is_done_when_its_last_part_came_and_its_neighbours_are_not(bench: Bench) -> None:
    outcomes = joined(bench, item(), item(stream=True))
    bench.streams.say(1, progress("a", 0, cached_tokens=1), progress(" b", 1, 2, finish="length", cached_tokens=1))
    wait_for(outcomes, 1)
    assert outcomes.by_index == {1: Success(_output("a b"), usage(3, 1), FinishReason.LENGTH)}
    assert outcomes.texts == {1: ["a", " b"]}
    bench.streams.say(0, progress("c d", 2, 3, END, finish="stop"))
    wait_for(outcomes, 0)
    assert outcomes.by_index[0] == Success(_output("c d"), usage(3), FinishReason.STOP)
    assert outcomes.texts.keys() == {1}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (progress("", END, finish="stop"), "the model ended its answer before the first token"),
        (progress("\ufffd", 0, END, finish="stop"), "the model wrote 2 tokens that are no text"),
        (progress("", 0, 0, finish="length"), "the model wrote 2 tokens that are no text"),
        (progress("a", 0, finish="error"), "the engine gave up: error"),
        (progress("a", 0, finish="length", has_nan=True), "the model computed a value that is not a finite number"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(bench: Bench, last: Progress, expected: str) -> None:
    outcomes = joined(bench, item())
    bench.streams.say(0, last)
    wait_for(outcomes, 0)
    assert outcomes.by_index[0] == Failure(Code.ENGINE_ERROR, expected)


def test_a_stop_string_at_the_beginning_leaves_an_empty_answer(bench: Bench) -> None:
    outcomes = joined(bench, item(stop=("a",)))
    bench.streams.say(0, progress("", 0, finish="stop", is_stopped_by_text=True))
    wait_for(outcomes, 0)
    assert outcomes.by_index[0] == Success(_output(""), usage(1), FinishReason.STOP)


def test_a_value_that_is_not_a_number_stops_its_item_and_is_not_told(bench: Bench) -> None:
    outcomes = joined(bench, item(stream=True), item())
    bench.streams.say(0, progress("a", 0), progress(" b", 1, has_nan=True))
    wait_for(outcomes, 0)
    assert outcomes.texts == {0: ["a"]}
    assert bench.streams.aborted == [bench.streams.requests[1].request_id]
    bench.streams.say(1, progress("a", 0, finish="length"))
    wait_for(outcomes, 1)


def test_a_request_that_is_refused_fails_alone(bench: Bench) -> None:
    bench.streams.refuses = True
    assert run_batch(bench.engine, [item()]) == [Failure(Code.ENGINE_ERROR, "vLLM refuses the request: Reason")]
    bench.streams.refuses = False
    outcomes = joined(bench, item())
    bench.streams.say(1, progress("a", 0, finish="length"))
    wait_for(outcomes, 0)


def test_log_probabilities_are_of_the_tokens_that_wrote_the_text(bench: Bench) -> None:
    at = [Logprobs(-1.0, ((token, -1.0), (3, -2.0))) for token in (0, 1, END)]
    whole = joined(bench, item(logprobs=2))
    bench.streams.say(0, progress("a b", 0, 1, END, finish="stop", logprobs=at))
    cut = joined(bench, item(logprobs=2, stop=("b",)))
    bench.streams.say(1, progress("a", 0, 1, finish="stop", logprobs=at[:2], is_stopped_by_text=True))
    plain = joined(bench, item())
    bench.streams.say(2, progress("a b", 0, 1, END, finish="stop"))
    for outcomes, names in ((whole, ("a", "b")), (cut, ("a",))):
        wait_for(outcomes, 0)
        outcome = outcomes.by_index[0]
        assert isinstance(outcome, Success)
        found = outcome.output.logprobs
        assert found is not None
        assert [entry.token.strip() for entry in found] == list(names)
        assert isinstance(found[0], TokenLogprob)
        assert [(other.token.strip(), other.logprob) for other in found[0].top] == [("a", -1.0), ("d", -2.0)]
        assert isinstance(found[0].top[0], TopLogprob)
    wait_for(plain, 0)
    assert plain.by_index[0] == Success(_output("a b"), usage(3), FinishReason.STOP)


def test_what_is_cancelled_is_aborted_once_and_costs_what_came(bench: Bench) -> None:
    outcomes = joined(bench, item(item_id="one", stream=True), item(item_id="two"))
    bench.streams.say(0, progress("a", 0))
    eventually(lambda: outcomes.texts)
    bench.engine.cancel(["one", "nobody"])
    bench.engine.cancel(["one"])
    wait_for(outcomes, 0)
    assert outcomes.by_index == {0: CancelledItem(usage(1))}
    assert outcomes.texts == {0: ["a"]}
    assert bench.streams.aborted == [bench.streams.requests[1].request_id]


def test_what_is_cancelled_while_vllm_takes_it_is_aborted_when_it_has_it(bench: Bench) -> None:
    bench.streams.holds_back = asyncio.Event()
    outcomes = joined(bench, item())
    eventually(lambda: len(bench.streams.requests) == 2)
    bench.engine.cancel(["item"])
    bench.streams.post(bench.streams.holds_back.set)
    wait_for(outcomes, 0)
    assert outcomes.by_index == {0: CancelledItem(usage(0))}


def test_an_observer_that_wants_an_item_no_more_is_asked_before_it_starts_and_after_every_step(bench: Bench) -> None:
    outcomes = Outcomes(cancelled=[0])
    bench.engine.join([item(), item()], outcomes)
    wait_for(outcomes, 0)
    assert outcomes.by_index == {0: CancelledItem(TokenUsage())}
    eventually(lambda: len(bench.streams.requests) == 2)
    steps = outcomes.steps
    outcomes.cancelled.add(1)
    bench.streams.iterate()
    wait_for(outcomes, 1)
    assert outcomes.by_index[1] == CancelledItem(usage(0))
    eventually(lambda: outcomes.steps == steps + 2, what="the step of the iteration, and the last")
    bench.streams.iterate()
    bench.engine.metrics()  # which the thread of the engine answers after that
    assert outcomes.steps == steps + 2


def test_two_tries_of_an_item_are_two_requests(bench: Bench) -> None:
    first, second = joined(bench, item()), joined(bench, item())
    bench.streams.say(1, progress("b", 1, finish="length"))
    wait_for(second, 0)
    bench.streams.say(0, progress("a", 0, finish="length"))
    wait_for(first, 0)
    assert isinstance(first.by_index[0], Success)
    assert first.by_index[0].output.text == "a"


def test_a_run_waits_for_its_last_outcome_and_counts_its_tokens(bench: Bench) -> None:
    done: queue.Queue[Any] = queue.Queue()
    outcomes = Outcomes()
    with _thread(lambda: done.put(bench.engine.run([item(), item(prompt="")], outcomes))):
        bench.streams.say(0, progress("a", 0, finish="length"))
        cost = done.get(timeout=10)
    assert (cost.useful_tokens, cost.computed_tokens) == (3, 3)
    assert outcomes.by_index[1] == Failure(Code.INVALID, "neither messages nor a prompt", "input")


@pytest.mark.parametrize("is_idle", [True, False])
def test_the_end_of_vllm_is_told_once_and_nobody_gets_an_outcome(bench: Bench, is_idle: bool) -> None:
    told: list[BaseException] = []
    bench.engine.watch(told.append)
    death = RuntimeError("gone")
    outcomes = joined(bench, item(), item())
    if is_idle:
        bench.streams.post(lambda: bench.streams.on_death(death))
    else:
        bench.streams.say(0, death)
        bench.streams.say(1, RuntimeError("gone as well"))
    eventually(lambda: told)
    for later in (lambda: bench.engine.join([item()], Outcomes()), lambda: run_batch(bench.engine, [item()])):
        with pytest.raises(EngineGoneError, match="gone") as caught:
            later()
        assert is_end_of_engine(caught.value), "no failure on what came after it"
        assert name_of_end(caught.value) == "RuntimeError"
    assert told == [death]
    assert outcomes.by_index == {}
    late: list[BaseException] = []
    bench.engine.watch(late.append)
    assert late == [death]


def test_a_run_that_waits_when_vllm_ends_raises_why(bench: Bench) -> None:
    raised: queue.Queue[BaseException] = queue.Queue()

    def run() -> None:
        with pytest.raises(EngineGoneError) as caught:
            run_batch(bench.engine, [item()])
        raised.put(caught.value)

    with _thread(run):
        bench.streams.say(0, RuntimeError("gone"))
        assert str(raised.get(timeout=10)) == "gone"


def test_an_observer_that_breaks_ends_the_engine_instead_of_losing_an_item(bench: Bench) -> None:
    class Broken(Outcomes):
        def step(self) -> None:
            raise OSError("nobody listens")

    told: list[BaseException] = []
    bench.engine.watch(told.append)
    bench.engine.join([item()], Broken())
    eventually(lambda: told)
    assert isinstance(told[0], OSError)


def test_prompts_become_tokens_by_the_encoder_of_all_engines(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "passages_template.txt").write_text("a {passages} a", encoding="utf-8")
    made: list[ScriptedStreams] = []

    async def start(
        spec: EngineSpec, on_iteration: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> ScriptedStreams:
        made.append(ScriptedStreams(on_iteration, on_death))
        return made[0]

    limits = replace(LIMITS, max_context_tokens=100)
    (own / "config.json").write_text(json.dumps({"max_position_embeddings": 100}))
    engine = VllmEngine(spec_of(own, limits, "words"), start)
    engine.load()
    asked = replace(item("b <end> c"), passages=(Passage("p", "</passages> <end>", 1.0),))
    outcomes = Outcomes()
    engine.join([asked], outcomes)
    made[0].say(0, progress("a", 0, finish="length"))
    wait_for(outcomes, 0)
    tokens = made[0].requests[1].prompt.token_ids
    assert END not in tokens
    encoder = PromptEncoder(PreTrainedTokenizerFast.from_pretrained(own), PassagesTemplate("a {passages} a"))
    assert tokens == encoder.encode(asked)
    assert tokens != PromptEncoder(PreTrainedTokenizerFast.from_pretrained(own)).encode(asked)
    engine.close()
    (own / "passages_template.txt").write_text("none", encoding="utf-8")
    with pytest.raises(EngineLoadError, match=r"passages_template\.txt: \{passages\} stands there 0 times"):
        VllmEngine(spec_of(own, limits, "words"), start).load()
    assert len(made) == 1


def test_the_metrics_are_those_of_vllm(bench: Bench) -> None:
    assert bench.engine.metrics() == "vllm:nothing 0\n"


def test_what_cannot_be_loaded_is_named_and_leaves_no_thread(folder: Path, tmp_path: Path) -> None:
    async def start(*_: object) -> ScriptedStreams:
        raise RuntimeError("Engine core initialization failed")

    engine = VllmEngine(spec_of(folder, LIMITS, "words"), start)
    with pytest.raises(EngineLoadError, match=f"words: {folder} cannot be loaded: Engine core initialization failed"):
        engine.load()
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm"]
    with pytest.raises(EngineLoadError, match="words: not loaded"):
        engine.join([item()], Outcomes())
    with pytest.raises(EngineLoadError, match=r"words: .* holds no model"):
        VllmEngine(spec_of(tmp_path / "no", LIMITS, "words"), start).load()
    longer = replace(LIMITS, max_context_tokens=17)
    with pytest.raises(EngineLoadError, match="max_context_tokens is 17, the weights hold 16"):
        VllmEngine(spec_of(folder, longer, "words"), start).load()


@pytest.mark.parametrize(
    ("first", "reason"), [(RuntimeError("no such kernel"), "no such kernel"), (progress(finish="length"), "no text")]
)
def test_a_model_without_a_first_token_is_a_load_error(folder: Path, first: Progress | Exception, reason: str) -> None:
    made: list[ScriptedStreams] = []

    async def start(
        spec: EngineSpec, on_iteration: Callable[[], None], on_death: Callable[[BaseException], None]
    ) -> ScriptedStreams:
        made.append(ScriptedStreams(on_iteration, on_death, first))
        return made[0]

    with pytest.raises(EngineLoadError, match=f"words: {folder}: the first run failed: .*{reason}"):
        VllmEngine(spec_of(folder, LIMITS, "words"), start).load()
    assert made[0].is_closed
