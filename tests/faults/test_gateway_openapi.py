"""Many calls of every route that is in the gateway's OpenAPI document, as it allows them and otherwise."""

from collections.abc import Iterator

import pytest
from schemathesis import GenerationMode

from producers.gateway.openai.batch_deps import BatchDeps
from tests.kit.native_kit import authenticate
from tests.kit.openapi_kit import FILES, HEALTH, NATIVE, OPENAI, Probe, gateway, modes, probing, scripted
from tests.kit.stack import PostgresServer, migrated_database

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_800)]

EXAMPLES = 100


@pytest.fixture(scope="module")
def probe(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    with migrated_database(postgres, "gateway_openapi") as database:
        deps = BatchDeps(authenticate, database.gateway_dsn, str(tmp_path_factory.mktemp("files")), lambda: 4)
        with probing(gateway(bench=scripted(), batches=deps)) as probe:
            yield probe


# schemathesis draws from `random` in its own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize(("method", "path", "mode"), modes(NATIVE | OPENAI | FILES | HEALTH))
def test_whatever_comes_is_answered_as_it_says(probe: Probe, method: str, path: str, mode: GenerationMode) -> None:
    probe.search(method, path, mode, EXAMPLES)
