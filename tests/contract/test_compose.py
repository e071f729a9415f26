"""docker-compose.yml held against the code: where no engine runs, its names, ports and settings are right by test."""

import importlib.util
import re
import shlex
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import typer
import yaml

from deploy import certificates
from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import PROJECT_ROOT
from deploy.local.postgres import DATABASE, OWNER_ROLE
from deploy.local.services import default_services, default_setup, read_pools
from deploy.models import prepare
from deploy.settings_docs import STORAGE_VARIABLES, setting_variables
from fairlane.settings import Settings
from fairlane_server.access.credentials import given_passwords
from fairlane_server.access.users import KafkaUser
from fairlane_server.cli import main as fairlane_main
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.topics.families import KafkaRole
from inference_consumers.__main__ import run as run_consumer
from producers.backfill.__main__ import main as backfill_main
from tests.contract.compose_file import PASSWORDS, ComposeService, compose, default_ones, our_services, services

SETTINGS = frozenset(variable.name for variable in setting_variables())
# Left at their defaults in containers: nothing is open there, and the files are in the image.
NOT_IN_CONTAINERS = frozenset(
    {
        *("ALLOW_OPEN_KAFKA", "CONSUMER_GROUP_PROTOCOL"),
        *("MODELS_FILE", "PRICES_FILE", "TENANTS_FILE"),
        # Its models are prepared in a volume; docs/model-registries.md says what a consumer needs for others.
        *("MODELS_CACHE_DIR", "MODELS_CACHE_MAX_BYTES", "MODELS_CACHE_TIMEOUT_S"),
        *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
        "ENDPOINTS_FILE",  # no model runs outside of it: who has one mounts the file
        "KAFKA_CREDENTIALS_FILE",  # user and password are in the environment
        "POSTGRES_ROLE_PREFIX",  # deploy/postgres/init.sql makes the default
        "DRAIN_TIMEOUT_S",  # stop_grace_period is made for the default
    }
)
# What the images of others read, as their documentation names it.
KNOWN_TO_IMAGES = {
    "schema-registry": r"APICURIO_(STORAGE_KIND|KAFKASQL_(BOOTSTRAP_SERVERS|SNAPSHOT_SCHEDULED_ENABLED))"
    r"|SMALLRYE_CONFIG_LOCATIONS|REGISTRY_PASSWORD",
    "setup-registry": r"ADMIN_PASSWORD",
    "kafka-ui": r"JAVA_OPTS|KAFKA_CLUSTERS_0_(NAME|BOOTSTRAPSERVERS|SCHEMAREGISTRY|READONLY|DEFAULT(KEY|VALUE)SERDE"
    r"|PROPERTIES_(SECURITY_PROTOCOL|SASL_(MECHANISM|JAAS_CONFIG)|SSL_TRUSTSTORE_(TYPE|LOCATION))"
    r"|CONSUMERPROPERTIES_ISOLATION_LEVEL)",
    "postgres": r"POSTGRES_(INITDB_ARGS|PASSWORD"
    r"|(OWNER|DISPATCHER|RECORDER|GATEWAY|BACKFILL|INGEST|ADMIN_API|OPERATOR)_PASSWORD)",
    # The program's own, and those that its command puts into its configuration.
    "redis": r"REDISCLI_AUTH|REDIS_(DISPATCHER|GATEWAY|SESSIONS|ADMIN_API)_PASSWORD",
    "redis-cache": r"REDISCLI_AUTH|REDIS_(DISPATCHER|GATEWAY|CONSUMER)_PASSWORD",
}
# Of the node, where it runs; everything else is in BROKER_SETTINGS.
WHERE_THE_NODE_RUNS = {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"}

each_service = pytest.mark.parametrize("service", services().values(), ids=lambda service: service.name)
each_of_ours = pytest.mark.parametrize("service", our_services(), ids=lambda service: service.name)
OWN_CONTAINERS = [service for service in services().values() if service.is_ours]
each_own_container = pytest.mark.parametrize("service", OWN_CONTAINERS, ids=lambda service: service.name)


def seconds(duration: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)", duration)
    assert found, duration
    return int(found[1]) * {"s": 1, "m": 60}[found[2]]


def health_port(service: ComposeService) -> int:
    found = re.search(r'"127\.0\.0\.1", (\d+)', " ".join(service.raw["healthcheck"]["test"]))
    assert found is not None
    return int(found[1])


# ------------------------------------------------------------------ what runs


def test_the_services_are_those_of_the_embedded_stack() -> None:
    assert sorted(service.python_commands for service in default_ones()) == sorted(
        (service.arguments,) for service in default_services()
    )
    by_instance = {service.environment["INSTANCE_ID"]: service.python_commands[0] for service in default_ones()}
    assert by_instance == {service.name: service.arguments for service in default_services()}


def test_the_setup_is_that_of_the_embedded_stack_and_fills_the_registry_first() -> None:
    tables = services()["setup-tables"].python_commands
    register = ("-m", "fairlane_server.cli", "schemas", "register")
    steps = [step.arguments for step in default_setup(Path("/credentials"))]
    assert services()["setup"].python_commands == (register, *(step for step in steps if step not in tables))
    assert len(tables) == 1
    assert {*tables} < {*steps}
    assert "setup-tables" in services()["setup"].raw["depends_on"]


def test_every_pool_has_a_consumer() -> None:
    pools = [service.python_commands[0][-1] for service in default_ones() if service.name.startswith("consumer-")]
    assert tuple(pools) == read_pools()


@each_own_container
def test_every_command_would_be_accepted(
    service: ComposeService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared: list[Path] = []

    def note(folder: Path, *_: object) -> list[prepare.PreparedModel]:
        prepared.append(folder)
        return []

    monkeypatch.setattr(prepare, "prepare", note)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")
    consumer = typer.Typer()
    consumer.command()(run_consumer)
    for dash_m, module, *arguments in service.python_commands:
        assert dash_m == "-m"
        assert importlib.util.find_spec(module)
        match module:
            case "fairlane_server.cli":
                # An option that does not exist is refused before help is shown.
                assert exit_status(partial(fairlane_main, [*arguments, "--help"])) == 0
            case "inference_consumers":
                assert exit_status(partial(consumer, [*arguments, "--help"])) == 0
            case "producers.backfill":
                assert exit_status(partial(backfill_main, [*arguments, "--help"])) == 0
            case "deploy.models.prepare":
                assert prepare.main(arguments) == 0
            case "deploy.certificates":
                assert exit_status(partial(certificates.main, [*arguments, "--help"])) == 0
            case _:
                assert not arguments
    assert prepared == ([Path("/models")] if service.name == "models" else [])
    assert "rror" not in capsys.readouterr().err


def exit_status(call: Callable[[], object]) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        call()
    return ended.value.code


# ------------------------------------------------------------------ settings


@each_own_container
def test_every_variable_of_ours_is_a_setting_or_about_storage(service: ComposeService) -> None:
    assert service.environment.keys() | service.handed_on <= SETTINGS | STORAGE_VARIABLES.keys()


def test_the_credentials_of_the_storage_reach_those_who_store_files_and_nobody_else() -> None:
    """Handed on as they are: Compose takes a variable without a value from .env or the shell."""
    given = {service.name for service in OWN_CONTAINERS if STORAGE_VARIABLES.keys() <= service.handed_on}
    assert given == {service.name for service in OWN_CONTAINERS if "FILES_URL" in service.environment}
    assert given == {"gateway", "backfill", "ingest"}
    for service in OWN_CONTAINERS:
        assert service.name in given or not STORAGE_VARIABLES.keys() & (service.handed_on | service.environment.keys())


@pytest.mark.parametrize("name", KNOWN_TO_IMAGES)
def test_every_variable_of_another_image_is_known_to_it(name: str) -> None:
    for variable in services()[name].environment:
        assert re.fullmatch(KNOWN_TO_IMAGES[name], variable), variable


@each_of_ours
def test_every_setting_reaches_the_services_or_is_left_out_on_purpose(service: ComposeService) -> None:
    fixed = {name for other in OWN_CONTAINERS for name in other.environment}
    assert (service.handed_on - STORAGE_VARIABLES.keys()) | fixed | NOT_IN_CONTAINERS == SETTINGS
    assert not service.handed_on & fixed
    assert not (service.handed_on | fixed) & NOT_IN_CONTAINERS


@each_own_container
def test_the_settings_are_accepted(service: ComposeService, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in service.environment.items():
        monkeypatch.setenv(name, value)
    Settings()


def test_each_service_connects_to_postgres_as_its_own_role_and_the_others_not_at_all() -> None:
    roles = {
        service.name: urlsplit(service.environment["POSTGRES_DSN"]).username
        for service in OWN_CONTAINERS
        if "POSTGRES_DSN" in service.environment
    }
    # It changes tenants, which is recorded there.
    assert roles.pop("setup") == PostgresRole.OPERATOR.name_in()
    assert roles == {role.value: role.name_in() for role in PostgresRole}
    embedded = {one.name.removesuffix("-1"): one.postgres_role for one in default_services() if one.postgres_role}
    assert embedded == {role.value: role for role in PostgresRole if role is not PostgresRole.OPERATOR}
    for service in OWN_CONTAINERS:
        known = {name for name, word in PASSWORDS.items() if name.startswith("POSTGRES") and word in str(service.raw)}
        own = {"setup-tables": "POSTGRES_OWNER_PASSWORD", "setup": "POSTGRES_OPERATOR_PASSWORD"} | {
            name: f"POSTGRES_{name.upper()}_PASSWORD" for name in roles
        }
        # POSTGRES_ADMIN_PASSWORD is the superuser's.
        own["admin"] = "POSTGRES_ADMIN_API_PASSWORD"
        assert known == ({own[service.name]} if service.name in own else set()), service.name


def test_each_process_connects_to_kafka_as_the_user_of_its_role_and_knows_no_other_password() -> None:
    users = {
        service.name: service.environment["KAFKA_SASL_USERNAME"]
        for service in OWN_CONTAINERS
        if "KAFKA_SASL_USERNAME" in service.environment
    }
    assert users.pop("setup") == ADMIN_USER
    assert users.pop("consumer-generate-gpu") == users["consumer-generate"]
    embedded = {one.name.removesuffix("-1"): one.user for one in default_services() if one.user}
    assert users == embedded | {"operator": KafkaUser(KafkaRole.OPERATOR).name}
    created = given_passwords(services()["setup"].environment["KAFKA_USER_PASSWORDS"])
    for name, user in users.items():
        assert services()[name].environment["KAFKA_SASL_PASSWORD"] == created.pop(user)
    viewer = KafkaUser(KafkaRole.VIEWER).name
    jaas = services()["kafka-ui"].environment["KAFKA_CLUSTERS_0_PROPERTIES_SASL_JAAS_CONFIG"]
    assert f'username="{viewer}" password="{created.pop(viewer)}"' in jaas
    assert not created
    kafkas = {word for name, word in PASSWORDS.items() if name.startswith("KAFKA")}
    for service in OWN_CONTAINERS:
        known = {word for word in kafkas if word in str(service.raw)}
        if service.name != "setup":
            own = service.environment.get("KAFKA_SASL_PASSWORD")
            assert known == (set() if own is None else {own}), service.name


def test_a_new_environment_file_has_a_password_for_each_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    script = shutil.copy(PROJECT_ROOT / "deploy" / "new_env.sh", tmp_path / "deploy")
    shutil.copy(PROJECT_ROOT / ".env.example", tmp_path)
    subprocess.run(("/bin/sh", script), check=True, capture_output=True, timeout=10)
    made = tmp_path / ".env"
    text = made.read_text(encoding="utf-8")
    found = dict(re.findall(r"^([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
    assert found.pop("TORCH_INDEX_URL") == ""
    assert found.keys() == PASSWORDS.keys()
    assert all(re.fullmatch(r"[0-9a-f]{48}", word) for word in found.values())
    assert len(set(found.values())) == len(found)
    assert made.stat().st_mode & 0o777 == 0o600
    again = subprocess.run(("/bin/sh", script), check=False, capture_output=True, text=True, timeout=10)
    assert again.returncode == 1
    assert ".env exists already" in again.stderr
    assert made.read_text(encoding="utf-8") == text


def test_only_the_step_that_makes_tables_knows_their_owner() -> None:
    assert [service.name for service in OWN_CONTAINERS if "POSTGRES_OWNER_DSN" in service.environment] == [
        "setup-tables"
    ]
    for service in OWN_CONTAINERS:
        assert PASSWORDS["POSTGRES_ADMIN_PASSWORD"] not in str(service.raw), service.name
    owner = urlsplit(services()["setup-tables"].environment["POSTGRES_OWNER_DSN"])
    assert (owner.username, owner.path) == (OWNER_ROLE, f"/{DATABASE}")


def test_every_instance_has_a_name_of_its_own_and_cannot_be_scaled() -> None:
    names = [service.environment["INSTANCE_ID"] for service in our_services()]
    assert len(set(names)) == len(names)
    project = compose()["name"]
    assert [service.raw["container_name"] for service in our_services()] == [f"{project}-{name}" for name in names]


def test_no_password_has_a_default() -> None:
    text = (PROJECT_ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for name in re.findall(r"\$\{(\w*PASSWORD\w*)", text):
        assert f"${{{name}:-" not in text
        assert f"${{{name}}}" not in text


@pytest.mark.parametrize("file", ["docker-compose.yml", "docs/operations.md", "docs/gateway.md"])
def test_the_line_that_makes_the_first_key_would_make_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (PROJECT_ROOT / file).read_text(encoding="utf-8")
    (line,) = set(re.findall(r"docker compose run --rm .*keys create[^#\n`]*", text))
    run = shlex.split(line.removeprefix("docker compose run --rm"))
    name, python, dash_m, module, *arguments = run
    assert (python, dash_m, module) == ("python", "-m", "fairlane_server.cli")
    # What `run` starts has the environment of the service, and waits for what it waits for.
    assert "POSTGRES_OWNER_DSN" in services()[name].environment
    assert services()[name].raw["depends_on"]["postgres"] == {"condition": "service_healthy"}
    assert arguments[:2] == ["keys", "create"]
    assert exit_status(partial(fairlane_main, [*arguments, "--help"])) == 0
    assert "rror" not in capsys.readouterr().err
    tenants = yaml.safe_load((PROJECT_ROOT / "deploy" / "tenants.yaml").read_text(encoding="utf-8"))["tenants"]
    assert arguments[arguments.index("--tenant") + 1] in {tenant["tenant"] for tenant in tenants}


# ------------------------------------------------------------------ addresses


@each_service
def test_ports_are_published_on_this_machine_only(service: ComposeService) -> None:
    assert all(host == "127.0.0.1" for host, _, _ in service.published)


def test_published_ports_do_not_clash() -> None:
    ports = [outside for service in services().values() for _, outside, _ in service.published]
    assert len(set(ports)) == len(ports)


@each_own_container
def test_every_address_is_that_of_a_service_it_waits_for(service: ComposeService) -> None:
    inside = {"kafka": 29092, "schema-registry": 8080, "postgres": 5432, "redis": 6379, "redis-cache": 6379}
    if service.name == "setup":
        inside["kafka"] = 29094
    named = {
        name: urlsplit(value if "//" in value else f"//{value}")
        for name, value in service.environment.items()
        if name
        in {
            "KAFKA_BOOTSTRAP_SERVERS",
            "SCHEMA_REGISTRY_URL",
            "POSTGRES_DSN",
            "POSTGRES_OWNER_DSN",
            "REDIS_URL",
            "REDIS_CACHE_URL",
        }
    }
    waits_for = all_dependencies(service.name)
    for name, address in named.items():
        assert address.hostname in waits_for, name
        assert address.port == inside[str(address.hostname)], name


def test_the_ports_of_other_images_are_those_they_listen_on() -> None:
    for name, port in {"schema-registry": 8080, "kafka-ui": 8080, "postgres": 5432, "prometheus": 9090}.items():
        assert [inside for _, _, inside in services()[name].published] == [port]
    assert not services()["redis"].published
    assert not services()["redis-cache"].published


def test_kafka_ui_reads_with_the_registry_that_the_services_write_with() -> None:
    viewer = services()["kafka-ui"].environment
    users = [service for service in OWN_CONTAINERS if "KAFKA_BOOTSTRAP_SERVERS" in service.environment]
    for service in users:
        assert service.environment["SCHEMA_REGISTRY_URL"] == viewer["KAFKA_CLUSTERS_0_SCHEMAREGISTRY"]
        if service.name != "setup":
            assert service.environment["KAFKA_BOOTSTRAP_SERVERS"] == viewer["KAFKA_CLUSTERS_0_BOOTSTRAPSERVERS"]


def test_prometheus_scrapes_exactly_the_services() -> None:
    config = yaml.safe_load((PROJECT_ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    groups = [group for job in config["scrape_configs"] for group in job.get("static_configs", ())]
    assert sorted(target for group in groups for target in group["targets"]) == sorted(
        f"{service.name}:{service.environment['METRICS_PORT']}" for service in default_ones()
    )
    # What runs with a profile alone is looked up, so that nothing is missing without it.
    names = [found for job in config["scrape_configs"] for found in job.get("dns_sd_configs", ())]
    assert sorted(f"{name}:{found['port']}" for found in names for name in found["names"]) == sorted(
        f"{service.name}:{service.environment['METRICS_PORT']}" for service in our_services() if service.is_optional
    )


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nUP", True),
        ("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nDOWN", False),
        ("", False),
    ],
)
def test_the_health_check_of_the_registry_needs_bash_alone(answer: str, *, healthy: bool) -> None:
    """Run as it is, with a PATH that has nothing."""
    name, *arguments, script = services()["schema-registry"].raw["healthcheck"]["test"]
    assert (name, *arguments) == ("CMD", "bash", "-ec")
    asked: list[str] = []

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("r", newline="") as lines:
                asked.extend(iter(lines.readline, "\r\n"))
                connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        here = script.replace("/127.0.0.1/9000", f"/127.0.0.1/{server.getsockname()[1]}")
        assert here != script
        done = subprocess.run(("/bin/bash", "-ec", here), env={"PATH": "/nowhere"}, check=False, timeout=10)
        thread.join()
    assert (done.returncode == 0) is healthy
    assert asked[0] == "GET /health/ready HTTP/1.1\r\n"
    assert len(asked) == 3


def test_the_health_check_of_the_registry_fails_while_nobody_listens() -> None:
    script = services()["schema-registry"].raw["healthcheck"]["test"][-1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    here = script.replace("/127.0.0.1/9000", f"/127.0.0.1/{port}")
    assert subprocess.run(("/bin/bash", "-ec", here), capture_output=True, check=False, timeout=10).returncode != 0


@each_of_ours
def test_the_health_check_asks_the_port_that_is_listened_on(service: ComposeService) -> None:
    assert service.environment["METRICS_HOST"] == "0.0.0.0"
    assert health_port(service) == int(service.environment["METRICS_PORT"])
    assert "/health/ready" in " ".join(service.raw["healthcheck"]["test"])


# ------------------------------------------------------------------ order and life


def all_dependencies(name: str) -> set[str]:
    direct = set(services()[name].raw.get("depends_on", {}))
    return direct.union(*(all_dependencies(other) for other in direct))


@each_service
def test_everything_that_is_waited_for_can_be_waited_for(service: ComposeService) -> None:
    for name, wait in service.raw.get("depends_on", {}).items():
        target = services()[name]
        if target.is_one_shot:
            assert wait["condition"] == "service_completed_successfully", name
            assert "healthcheck" not in target.raw
        else:
            assert wait["condition"] == "service_healthy", name
            assert target.raw["healthcheck"]["test"], name


@each_service
def test_restarts_and_limits(service: ComposeService) -> None:
    assert service.raw["restart"] in {"no", "unless-stopped"}
    assert re.fullmatch(r"\d+[mg]", service.raw["deploy"]["resources"]["limits"]["memory"])
    if not service.is_one_shot:
        check = service.raw["healthcheck"]
        assert seconds(check["timeout"]) <= seconds(check["interval"])
        assert check["retries"] >= 3


@each_of_ours
def test_a_service_may_finish_its_work_before_it_is_killed(service: ComposeService) -> None:
    drain_s = float(Settings.model_fields["drain_timeout_s"].default)
    # The running batch and then the commit may each take the timeout.
    assert seconds(service.raw["stop_grace_period"]) > 2 * drain_s


@each_own_container
def test_our_containers_have_no_rights_they_do_not_need(service: ComposeService) -> None:
    assert service.raw["read_only"] is True
    assert service.raw["cap_drop"] == ["ALL"]
    assert service.raw["security_opt"] == ["no-new-privileges:true"]
    assert "user" not in service.raw  # the image's, which is not root


@each_service
def test_every_mounted_file_and_volume_exists(service: ComposeService) -> None:
    for mount in service.raw.get("volumes", ()):
        source, target, *_ = mount.split(":")
        assert target.startswith("/")
        if source.startswith("./"):
            assert (PROJECT_ROOT / source).is_file()
            assert mount.endswith(":ro")
        else:
            assert source in compose()["volumes"]


def test_the_consumer_on_a_gpu_stands_in_for_the_other_one_of_its_pool() -> None:
    (on_gpu,) = (service for service in our_services() if service.is_optional)
    (other,) = (one for one in default_ones() if one.python_commands == on_gpu.python_commands)
    assert on_gpu.raw["profiles"] == ["gpu"]
    assert f"--profile gpu up --build --scale {other.name}=0" in (PROJECT_ROOT / "docker-compose.yml").read_text()
    (device,) = on_gpu.raw["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert on_gpu.environment["DEVICE"] == "cuda"
    # Compiled kernels are loaded from there.
    assert on_gpu.raw["tmpfs"] == [f"{folder}:exec" for folder in other.raw["tmpfs"]]
    assert on_gpu.environment.keys() - other.environment.keys() == {"VLLM_PYTHON"}
    for service in default_ones():
        assert "reservations" not in service.raw["deploy"]["resources"]
        assert service.environment.get("DEVICE", "cpu") == "cpu"


def test_files_that_the_gateway_takes_are_there_for_the_runner_of_jobs() -> None:
    gateway, runner = services()["gateway"], services()["backfill"]
    assert runner.raw["volumes"] == gateway.raw["volumes"]
    assert runner.environment["FILES_URL"] == gateway.environment["FILES_URL"]
    mounted = {mount.split(":")[1] for mount in runner.raw["volumes"]}
    assert runner.environment["FILES_URL"] in mounted
    # Uploads to S3 are whole there first: /tmp is memory of the container.
    assert gateway.environment["FILES_SPOOL_DIR"] in mounted


def test_the_models_are_read_from_where_they_are_prepared() -> None:
    (prepared,) = services()["models"].raw["volumes"]
    assert services()["models"].python_commands[0][-1] == prepared.split(":")[1]
    for service in our_services():
        if service.name.startswith("consumer-"):
            assert f"{prepared}:ro" in service.raw["volumes"]
            assert service.environment["MODELS_DIR"] == prepared.split(":")[1]
            assert "models" in all_dependencies(service.name)
