"""What the stack runs of ours, in which order and with which environment."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.local.layout import Endpoints, StackError
from deploy.local.services import default_services, default_setup, read_pools
from deploy.local.stack import LocalStack
from fairlane_server.postgres.rights import PostgresRole

DSNS = {role: f"postgresql://{role}:p@h/d" for role in PostgresRole}
ENDPOINTS = Endpoints("k:1", "postgresql://o:p@h/d", "redis://h:1/0", postgres_dsns=DSNS)


def models(tmp_path: Path, *pools: tuple[str, ...]) -> Path:
    """A file of models, by their pools: the shared one first."""
    limits = {"max_context_tokens": 64, "max_output_tokens": 8}
    entry = {"version": "1", "engine": "simulated", "tasks": ["generate"], "path": "m", "limits": limits}
    entries = [
        {"model": f"m{number}", "pool": shared, "dedicated_pools": own, **entry}
        for number, (shared, *own) in enumerate(pools)
    ]
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": entries}))
    return file


def test_one_group_of_consumers_for_each_pool(tmp_path: Path) -> None:
    file = models(tmp_path, ("generate",), ("encode",), ("encode",))
    assert read_pools(file) == ("generate", "encode")
    services = default_services(dispatchers=2, consumers=2, engine="simulated", models_file=file)
    assert [service.name for service in services] == [
        *("dispatcher-1", "dispatcher-2", "recorder-1", "gateway-1", "admin-1", "backfill-1", "ingest-1"),
        *("consumer-generate-1", "consumer-generate-2", "consumer-encode-1", "consumer-encode-2"),
    ]
    consumer = services[-1].spec(ENDPOINTS, 20_001, ("kafka",))
    assert consumer.argv[1:] == ("-m", "inference_consumers", "--pool", "encode")
    assert consumer.env["INSTANCE_ID"] == "consumer-encode-2"
    assert consumer.env["METRICS_PORT"] == "20001"
    assert consumer.env["ENGINE"] == "simulated"
    assert consumer.env["KAFKA_BOOTSTRAP_SERVERS"] == "k:1"
    assert consumer.depends_on == ("kafka",)
    assert consumer.health_url == "http://127.0.0.1:20001/health/ready"


def test_the_pools_of_single_tenants_get_consumers_too(tmp_path: Path) -> None:
    file = models(tmp_path, ("generate", "acme-gpu"), ("encode", "acme-gpu", "b-gpu"), ("encode",))
    assert read_pools(file) == ("generate", "encode", "acme-gpu", "b-gpu")
    services = default_services(models_file=file)
    assert [service.name for service in services if service.name.startswith("consumer")] == [
        *("consumer-generate-1", "consumer-encode-1", "consumer-acme-gpu-1", "consumer-b-gpu-1")
    ]
    assert services[-1].spec(ENDPOINTS, 20_001, ()).argv[-2:] == ("--pool", "b-gpu")


def test_the_gateway_and_the_admin_api_get_ports_of_their_own(tmp_path: Path) -> None:
    services = default_services(models_file=models(tmp_path, ("generate",)))
    served = {service.name: service for service in services if service.port_variable is not None}
    assert {name: service.port_variable for name, service in served.items()} == {
        "gateway-1": "GATEWAY_PORT",
        "admin-1": "ADMIN_PORT",
    }
    for service in served.values():
        spec = service.spec(ENDPOINTS, 20_001, (), 20_002)
        assert (spec.env["METRICS_PORT"], spec.env[service.port_variable or ""]) == ("20001", "20002")
        others = [other for other in services if other is not service]
        assert all(service.port_variable not in other.spec(ENDPOINTS, 1, (), 2).env for other in others)


def test_the_engine_is_not_overridden_unless_asked(tmp_path: Path) -> None:
    file = models(tmp_path, ("generate",))
    for service in default_services(models_file=file):
        assert "ENGINE" not in service.spec(ENDPOINTS, 20_001, ()).env


def test_the_pools_of_the_project_can_be_read() -> None:
    assert read_pools()


@pytest.mark.parametrize("text", ["", "models: 1", "models: [{model: x}]", "{", "[]"])
def test_a_models_file_without_models_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    with pytest.raises(StackError, match=r"models\.yaml:\d+: "):
        read_pools(file)


def test_a_missing_models_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StackError, match=r"none\.yaml: cannot be read"):
        read_pools(tmp_path / "none.yaml")


def test_only_the_step_that_makes_tables_gets_their_owner() -> None:
    known = ["kafka", "postgres", "redis"]
    specs = []
    for step in default_setup():
        specs.append(step.spec(ENDPOINTS, known))
        known.append(step.name)
    assert [spec.argv[3:] for spec in specs] == [
        ("topics", "apply"),
        ("models", "apply"),
        ("db", "upgrade"),
        ("tenants", "apply"),
        ("prices", "apply"),
    ]
    assert [spec.depends_on for spec in specs] == [
        ("kafka",),
        ("kafka", "setup-topics"),
        ("postgres",),
        ("kafka", "setup-models", "setup-tables"),
        ("kafka", "setup-tenants"),
    ]
    assert ["POSTGRES_OWNER_DSN" in spec.env for spec in specs] == [False, False, True, False, False]
    dsns = [spec.env.get("POSTGRES_DSN") for spec in specs]
    assert dsns == [None, None, None, DSNS[PostgresRole.OPERATOR], None]
    assert all({"POSTGRES_DSN", "POSTGRES_OWNER_DSN"} < {*spec.without_env} for spec in specs)


def test_each_service_gets_its_own_way_into_postgres_and_who_needs_none_gets_none(tmp_path: Path) -> None:
    specs = [service.spec(ENDPOINTS, 1, ()) for service in default_services(models_file=models(tmp_path, ("words",)))]
    assert {spec.name: spec.env.get("POSTGRES_DSN") for spec in specs} == {
        "dispatcher-1": DSNS[PostgresRole.DISPATCHER],
        "recorder-1": DSNS[PostgresRole.RECORDER],
        "gateway-1": DSNS[PostgresRole.GATEWAY],
        "backfill-1": DSNS[PostgresRole.BACKFILL],
        "admin-1": DSNS[PostgresRole.ADMIN],
        "ingest-1": DSNS[PostgresRole.INGEST],
        "consumer-words-1": None,
    }
    # Nor what the supervisor has in its environment.
    variables = {"POSTGRES_DSN", "POSTGRES_OWNER_DSN", *(f"POSTGRES_{role.name}_DSN" for role in PostgresRole)}
    assert all({*spec.without_env} == variables for spec in specs)


def test_without_postgres_tenants_are_set_up_without_a_record_in_the_audit() -> None:
    step = next(step for step in default_setup() if step.name == "setup-tenants")
    spec = step.spec(replace(ENDPOINTS, postgres_dsns={}), ["kafka"])
    assert spec.argv[3:] == ("tenants", "apply", "--no-audit")
    assert "POSTGRES_DSN" not in spec.env
    assert step.spec(ENDPOINTS, []).argv[3:] == ("tenants", "apply")


def test_a_step_waits_for_every_broker() -> None:
    topics = default_setup()[0]
    known = ["kafka-1-format", "kafka-1", "kafka-2", "kafka-3", "postgres"]
    assert topics.spec(ENDPOINTS, known).depends_on == ("kafka-1", "kafka-2", "kafka-3")


def test_a_step_does_not_wait_for_a_part_that_is_external() -> None:
    tables = next(step for step in default_setup() if step.as_owner)
    assert tables.spec(ENDPOINTS, ["kafka"]).depends_on == ()


@pytest.mark.parametrize(
    ("given", "expected"), [("", "data/files"), ("elsewhere", "elsewhere"), ("s3://b/f", "s3://b/f")]
)
def test_gateway_and_runner_keep_files_in_one_place_whatever_folder_they_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    services = default_services(models_file=models(tmp_path, ("generate",)))
    stack = LocalStack(data_dir=Path("data"), parts=(), services=services, environ={"FILES_URL": given})
    try:
        stack.prepare()
        env = {one.name: one.spec(stack.endpoints, 20_001, ()).env for one in services}
    finally:
        stack.stop()
    whole = expected if "://" in expected else str(tmp_path.resolve() / expected)
    assert env["gateway-1"]["FILES_URL"] == env["backfill-1"]["FILES_URL"] == whole
