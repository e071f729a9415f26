"""streaming: time to the first token through Fairlane, minus the engine's own.

The same prompts are asked one at a time, in turn: through client, dispatcher, consumer and back as a chunk, and of the
same engine in this process while the consumer's is idle.
"""

from statistics import median
from time import perf_counter

from benchmarks.cluster import cluster, shipped_engine, shipped_model
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import MODEL, consumer, dispatcher
from fairlane import Client
from fairlane.records import Parameters, RequestInput
from inference_consumers.engines.protocol import Engine, EngineItem, Outcomes

NAME = "streaming"
HOW = MEDIAN_OF_REPETITIONS
AIM_MS = 20.0
PROMPTS = 20
ANSWER_TOKENS = 8
_TENANT = "acme"
_PROMPT = "The capital of the country with number {number} on the list is"


class _FirstText(Outcomes):
    """Notes when the first text came."""

    at_s: float | None = None

    def text(self, index: int, delta: str) -> None:
        self.at_s = self.at_s or perf_counter()
        super().text(index, delta)


def run() -> Result:
    """Three repetitions; in each the difference of the medians over the same prompts."""
    model = shipped_model()
    with (
        cluster([dispatcher(), consumer(pool=model.pool)]) as running,
        shipped_engine(model) as engine,
        Client(_TENANT, settings=running.settings) as client,
    ):
        for number in range(3):
            _through_ms(client, _PROMPT.format(number=-number))

        def measure(repetition: int) -> dict[str, float]:
            prompts = [_PROMPT.format(number=repetition * PROMPTS + number) for number in range(PROMPTS)]
            pairs = [(_through_ms(client, prompt), _engine_ms(engine, prompt)) for prompt in prompts]
            through, alone = map(median, zip(*pairs, strict=True))
            return {"through_ms": through, "engine_ms": alone, "added_ms": through - alone}

        runs = repeated(measure)
    return Result(
        NAME,
        (
            Figure("time to first token beyond the engine's own", median_of(runs, "added_ms"), "ms", "at most", AIM_MS),
            Figure("through Fairlane", median_of(runs, "through_ms"), "ms"),
            Figure("the engine alone", median_of(runs, "engine_ms"), "ms"),
        ),
        runs,
    )


def _through_ms(client: Client, prompt: str) -> float:
    started = perf_counter()
    with client.stream(model=MODEL, prompt=prompt, max_tokens=ANSWER_TOKENS) as stream:
        next(iter(stream))
        first_ms = (perf_counter() - started) * 1_000
        for _ in stream:
            pass
    return first_ms


def _engine_ms(engine: Engine, prompt: str) -> float:
    parameters = Parameters(max_tokens=ANSWER_TOKENS, stream=True)
    first = _FirstText()
    started = perf_counter()
    engine.run([EngineItem("one", "generate", RequestInput(prompt=prompt), parameters)], first)
    if first.at_s is None:
        raise RuntimeError("the engine streamed nothing")
    return (first.at_s - started) * 1_000
