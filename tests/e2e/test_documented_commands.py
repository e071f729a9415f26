"""Every command in the documents, run as it stands there, on a stack that `make up` made."""

import base64
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import psycopg
import pytest
import yaml
from confluent_kafka import Message, Producer

from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import PROJECT_ROOT, DataDir, Endpoints
from fairlane import Client
from fairlane.clock import now_ms
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers
from fairlane.kafka_config import idempotent_producer
from fairlane.names import DEAD_LETTER_WORK, priority_topic
from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.access.users import KafkaUser
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.topics.families import KafkaRole
from tests.kit.doc_blocks import DocumentedCommand, commands, fenced
from tests.kit.local_stack import running, user_environment
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

DOCUMENTS = (
    PROJECT_ROOT / "README.md",
    PROJECT_ROOT / "deploy" / "locust" / "README.md",
    *sorted((PROJECT_ROOT / "docs").rglob("*.md")),
)
OPERATIONS = PROJECT_ROOT / "docs" / "operations.md"
MODEL_VERSIONS = PROJECT_ROOT / "docs" / "model-versions.md"

NOT_RUN: Mapping[str, str] = {
    r"fairlane sessions ": "needs a user of Redis for it alone; run by tests/integration/test_sessions.py",
    r"fairlane drift show ": "needs a finding; run by tests/integration/test_drift.py",
    r"fairlane labels ": "needs a tenant that allows evaluation; run by tests/integration/test_labels.py",
    r"fairlane replay ": "needs a tenant that allows evaluation; run by tests/integration/test_log_replay.py",
    r"fairlane evaluation (set add (agreed|rated)|judge |run questions)": "needs labels and a judge; run by "
    "tests/integration/test_evaluation_runs.py",
    r"fairlane models (register digits-3\.yaml|sync )": "needs MLflow; tests/integration/test_mlflow_registry.py",
    r"fairlane models alias digits candidate 3": "the version that MLflow has",
    r"make ": "a target of its own: a tier of the tests, the demo, or the stack itself (test_first_hour)",
    r"sh deploy/new_env\.sh|docker ": "needs a Docker engine; the compose file is checked in tests/contract",
    r"cp deploy/nginx/|nginx ": "needs root and the port 443; tests/integration/test_edge.py runs the configuration",
    r"export KAFKA_": "addresses and a password of somebody's cluster; the stack's are in the environment",
    r"curl .*\$GATEWAY": "the address and the key of a stack at its usual place; test_first_hour runs what it prints",
    r"\.venv/bin/python -m (tests\.fuzz|benchmarks)": "minutes; their short runs are tests",
    r".*\.venv-locust": "an environment of its own; the profiles are run by tests/integration/test_replay.py",
    r"python -m producers\.replay profile": "minutes; run shortened by tests/integration/test_replay.py",
    r"python -m inference_consumers --pool gpu": "a pool that deploy/models.yaml does not have",
}
"""Beginnings of commands that are not run here, and why."""

UNTIL_CTRL_C = ("fairlane top", "python -m producers.backfill run --all", ".venv/bin/python -m deploy.local logs -f")
STATUSES: Mapping[str, frozenset[int]] = {
    "fairlane topics plan": frozenset({0, 2}),
    "fairlane routes plan": frozenset({0, 2}),
    "fairlane db status": frozenset({0, 2}),
    "fairlane access plan": frozenset({0, 2}),
    # The runner of the stack may have taken the job by then.
    "python -m producers.backfill run ": frozenset({0, 7}),
}
"""Exit statuses other than 0 that are no failure."""

RUNNER = "python -m producers.backfill"
LETTERS = 45


class PoisonError(DeadLetterError):
    """Why the letters of this test died."""


@dataclass(slots=True)
class Session:
    """A user in a folder of the project, with the addresses of the stack in the environment."""

    folder: Path
    environment: dict[str, str]
    runner_environment: dict[str, str]
    """Of the commands of offline jobs, which connect to Postgres as another role."""
    data_dir: Path
    gateway_url: str
    admin_url: str
    request_id: str
    letter: int
    found: dict[str, str] = field(default_factory=dict)
    """What earlier commands printed, by what stands for it in the documents."""

    def text_of(self, command: DocumentedCommand) -> str:
        """The command with this stack's own ids and addresses."""
        own = {
            "http://127.0.0.1:8080": self.gateway_url,
            "http://127.0.0.1:8081": self.admin_url,
            "REQUEST_ID": self.request_id,
            "dlq show 12 ": f"dlq show {self.letter} ",
            "--offsets -40": f"--offsets -{self.letter}",
            "/run/fairlane/": f"{self.folder}/",
            "deploy.local status": f"deploy.local status --data-dir {self.data_dir}",
            "deploy.local logs": f"deploy.local logs --data-dir {self.data_dir}",
            **self.found,
        }
        text = command.text
        for written, meant in own.items():
            text = text.replace(written, meant)
        return text

    def run(self, command: DocumentedCommand, exports: str) -> None:
        where = f"{command.document}:{command.line}: {command.text}"
        with subprocess.Popen(
            ("/bin/sh", "-ec", f"{exports}exec {self.text_of(command)}"),
            cwd=self.folder,
            env=self.runner_environment if RUNNER in command.text else self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            if command.text.startswith(UNTIL_CTRL_C) and "--once" not in command.text:
                assert process.stdout is not None
                stopped = process.stderr if "run --all" in command.text else process.stdout
                assert stopped is not None
                first = stopped.readline()
                process.send_signal(signal.SIGINT)
                out, complaint = process.communicate(timeout=60)
                assert first, where
                assert process.returncode in {0, 1, 3, 130, -signal.SIGINT}, f"{where}\n{out}\n{complaint}"
                return
            # Those that delete ask first.
            out, complaint = process.communicate("y\n", timeout=240)
        expected = next((codes for start, codes in STATUSES.items() if command.text.startswith(start)), {0})
        assert process.returncode in expected, f"{where}\n{out}\n{complaint}"
        if "backfill submit" in command.text and (job := re.search(r"\b[0-9a-f]{16}\b", out)):
            self.found["3f0c9a5be2d41d77"] = job[0]
        if command.text.startswith("fairlane evaluation run") and "--against" in command.text:
            runs = dict.fromkeys(re.findall(r"\b[0-9a-f]{16}\b", out))
            self.found.update(zip(("5b1e9c3f7a2d4860", "8c07d4e1b6f3a952"), runs, strict=False))
        if "keys create" in command.text and (key := re.search(r"fl_([0-9a-f]{16})_", out)):
            self.found["0123456789abcdef"] = key[1]
            self.found["fl_..."] = out.strip()


def _letters(settings: KafkaSettings) -> int:
    """Bury some work. Returns the offset of the last letter."""
    codec, offsets = default_codec(), []
    producer = Producer(idempotent_producer(settings))

    def written(error: object, message: Message) -> None:
        assert error is None
        offsets.append(message.offset() or 0)

    for number in range(LETTERS):
        source = SourceCoordinate(priority_topic("generate", "normal"), 0, 1_000_000 + number)
        request = InferenceRequest(
            f"00000000-0000-4000-8000-{now_ms():012x}"[:36],
            "smollm2-135m-instruct",
            "generate",
            RequestInput(prompt="again"),
            timeout_ms=60_000,
        )
        item = WorkItem(
            request=request,
            tenant="acme",
            pool="generate",
            model_version="1",
            priority_class="normal",
            cost_tokens=13,
            submitted_at_ms=now_ms(),
            admitted_at_ms=now_ms(),
            dispatched_at_ms=now_ms(),
            deadline_at_ms=now_ms() + 60_000,
            reply_topic="replies.acme",
            dispatcher_id="dispatcher-1",
            source=SourceCoordinate("requests.acme", 0, 1_000_000 + number),
            prompt_tokens=5,
        )
        letter_headers = dead_letter_headers(
            source,
            now_ms(),
            PoisonError("the engine died"),
            LetterWriter("consumer-1", "fairlane.pool.generate"),
            tenant="acme",
            model=request.model,
        )
        producer.produce(
            DEAD_LETTER_WORK,
            codec.encode(item),
            request.request_id,
            headers=list(letter_headers),
            on_delivery=written,
        )
    assert producer.flush(30) == 0
    return max(offsets)


def _models_file(folder: Path) -> Path:
    """A second version of digits, as docs/model-versions.md has it before its first command."""
    models = yaml.safe_load((PROJECT_ROOT / "deploy" / "models.yaml").read_text())["models"]
    second = next(one for one in models if one["model"] == "digits") | {"version": "2"}
    file = folder / "digits-2.yaml"
    file.write_text(yaml.safe_dump({"models": [second]}))
    return file


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoints, Path]]:
    data_dir = tmp_path_factory.mktemp("commands")
    with running(data_dir):
        endpoints = Endpoints.load(DataDir(data_dir).endpoints_file)
        assert endpoints is not None
        yield endpoints, data_dir


@pytest.fixture
def session(endpoints: tuple[Endpoints, Path], tmp_path: Path) -> Session:
    of_stack, data_dir = endpoints
    for name in ("deploy", "docs", "schemas", "topics.yaml", ".venv"):
        (tmp_path / name).symlink_to(PROJECT_ROOT / name)
    (tmp_path / ".fairlane").mkdir()
    (tmp_path / ".fairlane" / "models").symlink_to(PROJECT_ROOT / ".fairlane" / "models")
    rows = ({"input": {"prompt": f"question {number}"}} for number in range(5))
    (tmp_path / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,50,10\n2024-01-01 00:00:01,60,12\n"
    )
    # Of Kafka's administrator: the documents show commands of operators, of services and of tenants.
    environment = user_environment() | of_stack.operator_env(ADMIN_USER) | of_stack.owner_env
    environment |= {"PYTHONPATH": str(PROJECT_ROOT), "COLUMNS": "200"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    image = base64.b64encode(bytes(64)).decode()
    (tmp_path / "digits.jsonl").write_text(f"{json.dumps({'id': '1', 'input': {'image': image}, 'expected': '0'})}\n")
    (rules,) = fenced(MODEL_VERSIONS, "yaml")
    (tmp_path / "rules.yaml").write_text(rules)
    second = (
        ("register", str(_models_file(tmp_path))),
        ("resume", "digits", "2"),
        ("alias", "digits", "candidate", "2"),
    )
    for arguments in second:
        command = (sys.executable, "-m", "fairlane_server.cli", "models", *arguments)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    for ending in (("rollout", "abort", "digits"), ("shadow", "stop", "digits")):
        # What the document before left under way. It is refused if there is nothing.
        command = (sys.executable, "-m", "fairlane_server.cli", *ending)
        subprocess.run(command, env=environment, check=False, capture_output=True)
    runner_environment = environment | of_stack.postgres_env(PostgresRole.BACKFILL)
    acme = of_stack.kafka_settings(KafkaUser(KafkaRole.TENANT, "acme").name)
    with Client("acme", settings=acme) as client:
        handle = client.submit(
            model="smollm2-135m-instruct",
            prompt="remember this",
            max_tokens=8,
            conversation_id="orders-17",
        )
        handle.result(60)
    _wait_until_recorded(of_stack.postgres_dsn(PostgresRole.OPERATOR), handle.request_id)
    letter = _letters(of_stack.kafka_settings(ADMIN_USER))
    urls = of_stack.gateway_url, of_stack.admin_url
    return Session(tmp_path, environment, runner_environment, data_dir, *urls, handle.request_id, letter)


def _wait_until_recorded(dsn: str, request_id: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT set_config('fairlane.tenant', '*', false)")

        def is_there() -> object:
            return connection.execute("SELECT 1 FROM results WHERE request_id = %s", (request_id,)).fetchone()

        eventually(is_there, what="the result in Postgres")


def _reason_not_run(command: DocumentedCommand) -> str | None:
    return next((why for start, why in NOT_RUN.items() if re.match(start, command.text)), None)


def _blocks(document: Path) -> list[list[DocumentedCommand]]:
    """The commands of each block: lines that follow one another."""
    numbered = enumerate(commands(document))
    return [[command for _, command in group] for _, group in groupby(numbered, key=_block_of)]


def _block_of(numbered: tuple[int, DocumentedCommand]) -> int:
    number, command = numbered
    return command.line - number


RUN = [document for document in DOCUMENTS if any(_reason_not_run(one) is None for one in commands(document))]


@pytest.mark.parametrize("document", RUN, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_every_command_of_a_document_runs_as_it_stands(document: Path, session: Session) -> None:
    for block in _blocks(document):
        exports = ""
        for command in block:
            if _reason_not_run(command) is not None:
                continue
            if command.text.startswith("export "):
                exports += f"{session.text_of(command)}; "
            else:
                session.run(command, exports)


@pytest.mark.parametrize("start", NOT_RUN)
def test_what_is_not_run_is_still_in_a_document(start: str) -> None:
    assert any(re.match(start, one.text) for document in DOCUMENTS for one in commands(document))


@pytest.mark.parametrize("statements", fenced(OPERATIONS, "sql"), ids=lambda sql: sql.split("FROM ")[1].split()[0])
def test_the_sql_of_operations_runs_as_it_stands(
    statements: str, session: Session, endpoints: tuple[Endpoints, Path]
) -> None:
    text = replace_id(statements, session.request_id)
    operator_dsn = endpoints[0].postgres_dsn(PostgresRole.OPERATOR)
    dsn = endpoints[0].postgres_owner_dsn if "admin_events" in text else operator_dsn
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = [connection.execute(one).rowcount for one in text.split(";") if one.strip()]
    assert sum(rows) > 0 or "admin_events" in text


def replace_id(statements: str, request_id: str) -> str:
    return statements.replace("…", request_id)


def test_the_python_of_collections_runs_as_it_stands(session: Session) -> None:
    (code,) = fenced(PROJECT_ROOT / "docs" / "collections.md", "python")
    done = subprocess.run(
        (sys.executable, "-c", code),
        cwd=session.folder,
        env=session.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 0
