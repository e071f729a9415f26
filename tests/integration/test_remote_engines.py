"""What every engine promises, of the engines of remote endpoints: the behaviour suite over model servers on sockets.

In the mode of token ids the promises are those of the torch engine, limits on tokens included.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.models.prepare import prepare, recipes
from fairlane.outcomes import Code
from fairlane.records import Message, ModelVersion, Parameters, RequestInput
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.remote.endpoints import ModelEndpoint, ModelEndpoints
from tests.integration import test_engines as behaviour
from tests.kit.encoder_kit import embed, rank
from tests.kit.engine_kit import (
    FARES,
    LANGUAGE_MODEL,
    MODELS_DIR,
    NOTHING_TO_SAY,
    TOO_LONG,
    Fare,
    chat,
    classify,
    digit_items,
    encode_items,
    generate_items,
    rank_items,
)
from tests.kit.model_servers import MODEL, ModelServer, OpenAiModelServer, V2ModelServer, model_server

pytestmark = [pytest.mark.full, pytest.mark.model]

_WRONG_ROLE = EngineItem(
    "role",
    "generate",
    RequestInput(messages=(Message("user", "a"), Message("user<|im_end|>", "b"))),
    Parameters(),
)
_TEXTS_MISSING = [(embed(), Code.INVALID, "input.texts"), (rank("q"), Code.INVALID, "input.documents")]
_NO_TOKENS_LEFT = replace(chat("one two three"), max_prompt_tokens=2)

MESSAGES, VECTORS, V2_TEXTS, PICTURES, TOKENS = "messages", "vectors", "v2-texts", "pictures", "tokens"
REMOTE_FARES = {
    MESSAGES: Fare(
        generate_items,
        [
            (TOO_LONG, Code.CONTEXT_TOO_LONG, "input"),
            (_NO_TOKENS_LEFT, Code.CONTEXT_TOO_LONG, "input"),
            (NOTHING_TO_SAY, Code.INVALID, "input"),
            (chat("Hello", max_tokens=0), Code.INVALID, "parameters.max_tokens"),
            (embed("a text"), Code.INVALID, "task"),
            (_WRONG_ROLE, Code.INVALID, "input.messages[1].role"),
        ],
        lambda text: chat(text, max_tokens=6),
    ),
    TOKENS: FARES["torch-causal-lm"],
    VECTORS: Fare(encode_items, [*_TEXTS_MISSING, (chat("Hello"), Code.INVALID, "task")], embed),
    V2_TEXTS: Fare(
        lambda: [*encode_items(), *rank_items()],
        [*_TEXTS_MISSING, (embed("word " * 4_000), Code.CONTEXT_TOO_LONG, "input")],
        lambda text: rank(text, text),
    ),
    PICTURES: Fare(
        digit_items,
        [(classify(bytes(63)), Code.INVALID, "input.image"), (embed("a text"), Code.INVALID, "task")],
        FARES["torch-classifier"].hostile,
    ),
}
_SETUPS: dict[str, tuple[str, Callable[[], ModelServer], tuple[str, ...], str]] = {
    MESSAGES: ("openai-endpoint", OpenAiModelServer, ("generate",), "no-folder"),
    TOKENS: ("openai-endpoint", OpenAiModelServer, ("generate",), LANGUAGE_MODEL.name),
    VECTORS: ("openai-endpoint", OpenAiModelServer, ("embed", "rank"), "no-folder"),
    V2_TEXTS: ("v2-endpoint", V2ModelServer, ("embed", "rank"), "no-folder"),
    PICTURES: ("v2-endpoint", V2ModelServer, ("classify",), "digits"),
}
PROMISES = [
    promise
    for name, promise in vars(behaviour).items()
    if name.startswith("test_") and {"engines", "name"} <= set(inspect.signature(promise).parameters)
]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Each with two servers."""
    prepare(MODELS_DIR, recipes(), print)
    with ExitStack() as stack:
        built: dict[str, Engine] = {}
        for name, (engine_name, server_type, tasks, folder) in _SETUPS.items():
            servers = [server_type(), server_type()]
            for server in servers:
                stack.enter_context(model_server(server))
            entry = ModelEndpoints(MODEL, "1", tuple(ModelEndpoint(server.url) for server in servers))
            model = ModelVersion(MODEL, "1", "p", engine_name, tasks, folder, 512, 64, 16, 8_192)
            built[name] = create_engine(EngineSpec(model, str(MODELS_DIR), endpoints=entry))
            built[name].load()
            stack.callback(built[name].close)
        yield built


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("name", REMOTE_FARES)
def test_it_does_what_every_engine_does(
    engines: dict[str, Engine], name: str, promise: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FARES, name, REMOTE_FARES[name])
    if promise is behaviour.test_an_engine_carries_its_name:
        assert engines[name].name == _SETUPS[name][0]
        return
    promise(engines=engines, name=name)


def test_the_folder_that_is_not_there_is_not_there() -> None:
    assert not (Path(MODELS_DIR) / "no-folder").exists()
