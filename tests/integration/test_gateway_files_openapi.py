"""Files and batches on a real Postgres, held against the gateway's OpenAPI document."""

from collections.abc import Iterator

import pytest
from schemathesis import GenerationMode

from producers.gateway.openai.batch_deps import BatchDeps
from tests.kit.native_kit import authenticate
from tests.kit.openapi_kit import FILES, Probe, gateway, modes, probing
from tests.kit.stack import PostgresServer, migrated_database

EXAMPLES = 8


@pytest.fixture(scope="module")
def probe(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    with migrated_database(postgres, "gateway_files_openapi") as database:
        folder = tmp_path_factory.mktemp("files")
        deps = BatchDeps(authenticate, database.gateway_dsn, str(folder), lambda: 4)
        with probing(gateway(batches=deps)) as probe:
            yield probe


def test_the_way_of_a_batch_is_as_it_says(probe: Probe) -> None:
    upload = {"file": b"{}", "purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": 3_600}
    file = probe.call(("POST", "/v1/files"), body=upload, media_type="multipart/form-data").json()
    asked = {
        "input_file_id": file["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    batch = probe.call(("POST", "/v1/batches"), body=asked, media_type="application/json").json()
    one_file, one_batch = {"file_id": file["id"]}, {"batch_id": batch["id"]}
    assert probe.call(("GET", "/v1/batches/{batch_id}"), path_parameters=one_batch).json() == batch
    for path in ("/v1/files", "/v1/batches"):
        assert probe.call(("GET", path), query={"limit": 1}).json()["data"]
    assert probe.call(("GET", "/v1/files/{file_id}"), path_parameters=one_file).json() == file
    assert probe.call(("GET", "/v1/files/{file_id}/content"), path_parameters=one_file).content == b"{}"
    cancelled = probe.call(("POST", "/v1/batches/{batch_id}/cancel"), path_parameters=one_batch).json()
    assert cancelled["status"] == "cancelled"
    assert probe.call(("POST", "/v1/batches/{batch_id}/cancel"), path_parameters=one_batch).json() == cancelled
    assert probe.call(("DELETE", "/v1/files/{file_id}"), path_parameters=one_file).json()["deleted"]
    assert probe.call(("GET", "/v1/files/{file_id}"), path_parameters=one_file).status_code == 404


# schemathesis draws from `random` in its own strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize(("method", "path", "mode"), modes(FILES))
def test_whatever_comes_is_answered_as_it_says(probe: Probe, method: str, path: str, mode: GenerationMode) -> None:
    probe.search(method, path, mode, EXAMPLES)
