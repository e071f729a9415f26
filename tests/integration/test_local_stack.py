"""The embedded stack on its real parts: what they can do, what happens when they die, and how a stack ends."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from psycopg import sql

from deploy.local import probes
from deploy.local.layout import PROJECT_ROOT, AlreadyRunningError, DataDir, StackError
from deploy.local.run_record import ProcessId, RunRecord, processes_in
from deploy.local.services import Service, SetupStep
from deploy.local.stack import LocalStack
from deploy.local.status import read_status
from fairlane_server.postgres.rights import PostgresRole
from tests.kit.up_command import running
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

SERVICE = """
import http.server, os, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.end_headers()
print("instance", os.environ["INSTANCE_ID"], os.environ["KAFKA_BOOTSTRAP_SERVERS"], "POSTGRES_OWNER_DSN" in os.environ)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["METRICS_PORT"])), Health).serve_forever()
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A stack of all parts with a step and a service; the tests share it and leave it healthy."""
    made = LocalStack(
        data_dir=tmp_path_factory.mktemp("stack"),
        setup=(SetupStep("step", ("-c", "print('set up')"), after=("kafka", "postgres")),),
        services=(Service("service-1", ("-c", SERVICE)),),
        environ={},
    )
    with made:
        yield made


def read_one(servers: str, topic: str, **settings: str) -> Message:
    consumer = Consumer(
        {"bootstrap.servers": servers, "group.id": uuid.uuid4().hex, "auto.offset.reset": "earliest", **settings}
    )
    found: list[Message] = []

    def poll() -> bool:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            found.append(message)
        return bool(found)

    try:
        consumer.subscribe([topic])
        eventually(poll, 20, f"a record of {topic}")
    finally:
        consumer.close()
    return found[0]


def write_one(servers: str, topic: str, value: bytes) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(10)
    producer = Producer({"bootstrap.servers": servers, "transactional.id": topic, "message.max.bytes": 8_000_000})
    producer.init_transactions(10)
    producer.begin_transaction()
    producer.produce(topic, value)
    producer.commit_transaction(10)


def test_kafka_has_transactions_large_records_and_the_new_group_protocol(stack: LocalStack, unique: str) -> None:
    servers = stack.endpoints.kafka_bootstrap_servers
    write_one(servers, unique, b"x" * 2_500_000)
    message = read_one(servers, unique, **{"group.protocol": "consumer", "isolation.level": "read_committed"})
    assert len(message.value() or b"") == 2_500_000


def test_kafka_has_the_settings_that_the_design_needs(stack: LocalStack) -> None:
    admin = AdminClient({"bootstrap.servers": stack.endpoints.kafka_bootstrap_servers})
    resource = ConfigResource(ConfigResource.Type.BROKER, "1")
    config = admin.describe_configs([resource])[resource].result(10)
    for name, value in {
        "auto.create.topics.enable": "false",
        "offsets.retention.minutes": "43200",
        "message.max.bytes": "8388608",
        "group.consumer.session.timeout.ms": "6000",
        "group.min.session.timeout.ms": "3000",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    }.items():
        assert config[name].value == value


def test_a_topic_is_never_made_by_accident(stack: LocalStack, unique: str) -> None:
    servers = stack.endpoints.kafka_bootstrap_servers
    consumer = Consumer({"bootstrap.servers": servers, "group.id": unique})
    try:
        with pytest.raises(KafkaException) as raised:
            consumer.get_watermark_offsets(TopicPartition(unique, 0), timeout=10)
    finally:
        consumer.close()
    assert raised.value.args[0].code() in {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION}


@pytest.mark.parametrize("role", PostgresRole)
def test_postgres_gives_each_service_a_role_that_cannot_bypass_row_security(
    stack: LocalStack, role: PostgresRole
) -> None:
    with psycopg.connect(stack.endpoints.postgres_dsn(role)) as connection:
        rights = connection.execute(
            "SELECT rolname, rolsuper, rolbypassrls, rolcreatedb, rolcreaterole "
            "FROM pg_roles WHERE rolname = current_user"
        ).fetchone()
        assert rights == (f"fairlane_{role}", False, False, False, False)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (a int)")


def test_postgres_has_an_owner_of_the_tables(stack: LocalStack) -> None:
    with psycopg.connect(stack.endpoints.postgres_owner_dsn) as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("fairlane_owner",)
        assert connection.execute(
            "SELECT rolsuper, rolbypassrls FROM pg_roles WHERE rolname = current_user"
        ).fetchone() == (False, False)
        connection.execute("CREATE TABLE t (a vector(3))")
        connection.execute("INSERT INTO t VALUES ('[1,2,3]')")
        assert connection.execute("SELECT a <-> '[1,2,4]' FROM t").fetchone() == (1.0,)
        connection.rollback()


def test_postgres_lets_nobody_in_without_the_password(stack: LocalStack) -> None:
    dsn = psycopg.conninfo.make_conninfo(stack.endpoints.postgres_dsn(PostgresRole.GATEWAY), password="wrong")
    assert "password authentication failed" in (probes.postgres(dsn) or "")
    with psycopg.connect(stack.endpoints.postgres_owner_dsn) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)


def test_redis_keeps_state_and_caches_apart(stack: LocalStack) -> None:
    expected = {
        stack.endpoints.redis_url: ("1024", "noeviction", "yes"),
        stack.endpoints.redis_cache_url: ("128", "allkeys-lru", "no"),
    }
    assert len(expected) == 2
    for url, (mebibytes, policy, is_kept) in expected.items():
        with redis.Redis.from_url(url, decode_responses=True) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(int(mebibytes) * 1024 * 1024)}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": policy}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("appendonly") == {"appendonly": is_kept}


def test_the_service_got_its_addresses_but_not_the_owner(stack: LocalStack) -> None:
    servers = stack.endpoints.kafka_bootstrap_servers
    log = stack.data_dir.logs / "service-1.log"
    assert log.read_text().splitlines()[0] == f"instance service-1 {servers} False"


def test_kafka_comes_back_with_its_data_after_a_kill(stack: LocalStack, unique: str) -> None:
    servers = stack.endpoints.kafka_bootstrap_servers
    write_one(servers, unique, b"kept")
    pid = stack.supervisor.kill("kafka")
    stack.supervisor.wait_ready("kafka", 60, other_than_pid=pid)
    assert read_one(servers, unique).value() == b"kept"


def test_postgres_comes_back_with_its_data_after_a_kill(stack: LocalStack, unique: str) -> None:
    with psycopg.connect(stack.endpoints.postgres_owner_dsn) as connection:
        connection.execute(sql.SQL("CREATE TABLE {} AS SELECT 7 AS a").format(sql.Identifier(unique)))
    pid = stack.supervisor.kill("postgres")
    stack.supervisor.wait_ready("postgres", 60, other_than_pid=pid)
    with psycopg.connect(stack.endpoints.postgres_owner_dsn) as connection:
        assert connection.execute(sql.SQL("TABLE {}").format(sql.Identifier(unique))).fetchone() == (7,)


def test_a_service_comes_back_after_a_kill(stack: LocalStack) -> None:
    pid = stack.supervisor.kill("service-1")
    view = stack.supervisor.wait_ready("service-1", 20, other_than_pid=pid)
    assert view.deaths >= 1


def test_the_status_tells_who_is_well(stack: LocalStack) -> None:
    command = (sys.executable, "-m", "deploy.local", "status", "--data-dir", str(stack.data_dir.root))
    answer = subprocess.run(
        (*command, "--json"), cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    status = json.loads(answer.stdout)
    assert answer.returncode == 0, answer.stdout
    assert status["healthy"] is True
    parts = {part["name"]: part for part in status["parts"]}
    assert {name for name, part in parts.items() if part["checked"]} == {
        "kafka",
        "postgres",
        "redis",
        "redis-cache",
        "service-1",
    }
    assert parts["kafka"]["address"] == stack.endpoints.kafka_bootstrap_servers
    assert parts["step"]["state"] == "done"
    passwords = {
        str(psycopg.conninfo.conninfo_to_dict(dsn)["password"]) for dsn in stack.endpoints.postgres_dsns.values()
    }
    assert len(passwords) == len(PostgresRole)
    assert not [password for password in passwords if password in answer.stdout]
    for_people = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert "service-1" in for_people.stdout
    assert not [password for password in passwords if password in for_people.stdout]


def test_the_status_names_what_does_not_answer(stack: LocalStack) -> None:
    stack.supervisor.kill("service-1", signal.SIGSTOP)
    try:
        parts = {part.name: part for part in read_status(stack.data_dir).parts}
    finally:
        stack.supervisor.kill("service-1", signal.SIGCONT)
    assert "timed out" in (parts["service-1"].problem or "")
    assert parts["kafka"].problem is None


def test_a_second_stack_in_the_same_folder_is_not_started_and_the_first_is_shown(stack: LocalStack) -> None:
    with pytest.raises(AlreadyRunningError, match=f"already running in .* \\(supervisor {os.getpid()}\\)"):
        LocalStack(data_dir=stack.data_dir.root, environ={}).start()
    command = (sys.executable, "-m", "deploy.local", "up", "--bare", "--data-dir", str(stack.data_dir.root))
    answer = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert stack.endpoints.kafka_bootstrap_servers in answer.stdout
    assert answer.stdout.splitlines()[-1].startswith("a stack is already running in ")
    assert read_status(stack.data_dir).healthy


def test_external_parts_are_used_and_not_started(stack: LocalStack, tmp_path: Path) -> None:
    environ = {
        "KAFKA_BOOTSTRAP_SERVERS": stack.endpoints.kafka_bootstrap_servers,
        "REDIS_URL": stack.endpoints.redis_url,
        "REDIS_CACHE_URL": stack.endpoints.redis_cache_url,
    }
    shared_dsn, gateway_dsn = map(stack.endpoints.postgres_dsn, (PostgresRole.OPERATOR, PostgresRole.GATEWAY))
    of_postgres = {"POSTGRES_DSN": shared_dsn, "POSTGRES_GATEWAY_DSN": gateway_dsn}
    step = SetupStep("step", ("-c", "import os; print(os.environ['REDIS_URL'])"), after=("kafka", "redis"))
    with LocalStack(data_dir=tmp_path, setup=(step,), environ=environ | of_postgres) as other:
        assert [view.name for view in other.supervisor.processes()] == ["step"]
        assert other.endpoints.service_env == environ | {"FILES_URL": str(tmp_path / "files")}
        dsns = {role: gateway_dsn if role is PostgresRole.GATEWAY else shared_dsn for role in PostgresRole}
        assert (other.endpoints.postgres_dsns, other.endpoints.postgres_owner_dsn) == (dsns, shared_dsn)
        assert (tmp_path / "logs" / "step.log").read_text().strip() == stack.endpoints.redis_url
        external = {part.name for part in read_status(other.data_dir).parts if part.state == "external"}
        assert external == {"kafka", "postgres", "redis", "redis-cache"}
    assert read_status(stack.data_dir).healthy


@pytest.mark.parametrize(
    ("variable", "address"),
    [
        ("KAFKA_BOOTSTRAP_SERVERS", "127.0.0.1:1"),
        ("POSTGRES_DSN", "postgresql://someone:s3cret@127.0.0.1:1/db"),
        ("REDIS_URL", "redis://:s3cret@127.0.0.1:1/0"),
    ],
)
def test_an_external_part_that_does_not_answer_is_named_by_its_variable(
    tmp_path: Path, variable: str, address: str
) -> None:
    with pytest.raises(StackError) as raised:
        LocalStack(data_dir=tmp_path, environ={variable: address}).start()
    message = str(raised.value)
    assert message.startswith(f"{variable} is set, but that ")
    assert "refused" in message
    assert len(message.splitlines()) == 1
    assert "s3cret" not in message


@pytest.fixture
def all_but_redis(stack: LocalStack) -> dict[str, str]:
    """The environment in which only Redis is started."""
    return {name: value for name, value in stack.endpoints.operator_env("").items() if name != "REDIS_URL"}


def redis_pid(data_dir: Path) -> ProcessId | None:
    record = RunRecord.load(DataDir(data_dir).processes_file)
    return next((entry.identity for entry in record.processes if entry.name == "redis"), None) if record else None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_stack_in_order(
    tmp_path: Path, all_but_redis: dict[str, str], stack: LocalStack, signum: signal.Signals
) -> None:
    with running(tmp_path, all_but_redis) as process:
        server = redis_pid(tmp_path)
        assert server is not None
        process.send_signal(signum)
        assert process.wait(20) == 0
        assert not server.is_alive()
    assert "ready to exit" in (tmp_path / "logs" / "redis.log").read_text()
    assert read_status(stack.data_dir).healthy, "what it did not start goes on"


def test_a_part_that_keeps_dying_ends_the_stack_with_that_reason(tmp_path: Path, all_but_redis: dict[str, str]) -> None:
    with running(tmp_path, all_but_redis) as process:
        killed: set[ProcessId] = set()

        def kill_it_again() -> bool:
            server = redis_pid(tmp_path)
            if server is not None and server not in killed:
                server.send(signal.SIGKILL)
                killed.add(server)
            return process.poll() is not None

        eventually(kill_it_again, 30, "the end of the stack")
        assert process.returncode == 1
        assert len(killed) == 6
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "died (killed by SIGKILL), restarting in" in errors
    assert (
        "fairlane: redis: died 6 times within 60 s, the last time with killed by SIGKILL; the end of its log" in errors
    )
    assert "Ready to accept connections" in errors


def alive(data_dir: Path) -> list[ProcessId]:
    record = RunRecord.load(DataDir(data_dir).processes_file)
    assert record is not None
    return [
        *(entry.identity for entry in record.processes if entry.identity is not None),
        *processes_in(DataDir(data_dir).postgres / "data"),
    ]


def test_a_stack_ends_with_its_supervisor_and_starts_again(tmp_path: Path) -> None:
    """Killed: everything dies with it, and the next one starts on the same data. Asked to end: nothing is left."""
    with running(tmp_path) as process:
        first = alive(tmp_path)
        assert len(first) > 3
        process.kill()
        process.wait(10)
        eventually(lambda: not any(part.is_alive() for part in first), what="the end of every part")
        # As after a crash of the machine, with the pid of the old server in use by somebody else.
        pid_file = tmp_path / "postgres" / "data" / "postmaster.pid"
        pid_file.write_text(f"{os.getppid()}\n{tmp_path / 'postgres' / 'data'}\n0\n1\n\n\n\nready\n")
    with running(tmp_path) as process:
        second = alive(tmp_path)
        assert not {part.pid for part in first} & {part.pid for part in second}
        down = (sys.executable, "-m", "deploy.local", "down", "--data-dir", str(tmp_path))
        subprocess.run(down, cwd=PROJECT_ROOT, timeout=60, check=True)
        assert process.wait(30) == 0
        assert not any(part.is_alive() for part in second)
    assert RunRecord.load(DataDir(tmp_path).processes_file) is None
    assert not DataDir(tmp_path).endpoints_file.exists()
