"""`python -m deploy.local up|down|status|logs`: the embedded stack from a terminal."""

import json
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, TextIO

import typer
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from deploy.local.layout import (
    DEFAULT_DATA_DIR,
    PROJECT_ROOT,
    AlreadyRunningError,
    DataDir,
    Endpoints,
    StackError,
    mask,
)
from deploy.local.logs import LogKeeper, tail
from deploy.local.run_record import stop_running
from deploy.local.services import ENGINES, MODELS_FILE, TENANTS_FILE, default_services, default_setup
from deploy.local.stack import LocalStack, kafka_credentials
from deploy.local.status import StackStatus, read_status
from deploy.local.supervisor import Supervisor
from fairlane.outcomes import Task
from fairlane_server.access.users import KafkaUser
from fairlane_server.api_keys.key_store import ApiKeys, ApiKeysError
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.models.models_file import load_models
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.private_files import write_private
from fairlane_server.topics.families import KafkaRole

DOWN_TIMEOUT_S = 120.0
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Real Kafka, Postgres and Redis, and our services, on this machine.",
)

DataDirOption = Annotated[Path, typer.Option("--data-dir", help="Everything the stack writes is below it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def up(
    *,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    brokers: Annotated[int, typer.Option(help="Number of Kafka brokers, 1 or 3: of 3, any one may die.")] = 1,
    dispatchers: Annotated[int, typer.Option(min=1, help="Number of dispatchers.")] = 1,
    consumers: Annotated[int, typer.Option(min=1, help="Number of inference consumers of each pool.")] = 1,
    engine: Annotated[str | None, typer.Option(help=f"Which engines run: {', '.join(ENGINES)}.")] = None,
    plaintext: Annotated[
        bool,
        typer.Option("--plaintext", help="Kafka and Redis without passwords and rights, and no TLS."),
    ] = False,
    bare: Annotated[bool, typer.Option("--bare", help="Only Kafka, Postgres and Redis, no services.")] = False,
    tail_logs: Annotated[bool, typer.Option("--tail/--no-tail", help="Show the logs as they are written.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Start everything, say how to reach it, and keep it running until Ctrl-C."""
    if engine is not None and engine not in ENGINES:
        raise StackError(f"--engine {engine}: there is only {', '.join(ENGINES)}")
    console = Console(sys.stderr if as_json else sys.stdout, follow=tail_logs and not as_json)
    stack = LocalStack(
        data_dir=data_dir,
        brokers=brokers,
        secured=not plaintext,
        setup=() if bare else default_setup(None if plaintext else kafka_credentials(data_dir)),
        services=() if bare else default_services(dispatchers=dispatchers, consumers=consumers, engine=engine),
        report=console.report,
        sink=console.log_line,
    )
    try:
        asked = _stop_on_signals(stack.prepare())
    except AlreadyRunningError as error:
        _greet(DataDir(data_dir.resolve()), as_json=as_json, note=str(error))
        return
    try:
        stack.start()
        _greet(stack.data_dir, as_json=as_json, note="Stop it with Ctrl-C.")
        console.begin_to_follow()
        stack.supervisor.wait()
    except StackError:
        if asked:
            raise typer.Exit(INTERRUPTED) from None
        raise
    finally:
        stack.stop()
    if stack.supervisor.failure is not None:
        raise StackError(stack.supervisor.failure)


@app.command()
def down(data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonOption = False) -> None:
    """Stop the stack that runs in a data directory, or what a crashed one left."""
    stopped = stop_running(DataDir(data_dir.resolve()), DOWN_TIMEOUT_S)
    if as_json:
        print(json.dumps({"data_dir": str(data_dir), "stopped": stopped}))
    else:
        print("stopped" if stopped else f"no stack is running in {data_dir}")


@app.command()
def status(data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonOption = False) -> None:
    """Show each part and its health; exit status 1 unless all of them are well."""
    found = read_status(DataDir(data_dir.resolve()))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print_status(found)
    raise typer.Exit(0 if found.healthy else 1)


@app.command()
def logs(
    names: Annotated[list[str] | None, typer.Argument(help="Processes; all of them if none is named.")] = None,
    lines: Annotated[int, typer.Option("-n", min=0, help="Lines from the end of each log.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is written from now on.")] = False,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonOption = False,
) -> None:
    """Show the ends of the logs."""
    folder = DataDir(data_dir.resolve()).logs
    known = sorted(path.stem for path in folder.glob("*.log"))
    if unknown := set(names or ()) - set(known):
        raise StackError(f"no log of {', '.join(sorted(unknown))} in {folder}; there is {', '.join(known) or 'none'}")
    console = Console()
    console.begin_to_follow()

    def show(name: str, line: str) -> None:
        if as_json:
            print(json.dumps({"process": name, "line": line}), flush=True)
        else:
            console.log_line(name, line)

    for name in names or known:
        for line in tail(folder / f"{name}.log", lines):
            show(name, line)
    if not follow:
        return
    keeper = LogKeeper(folder, names or known, show, max_bytes=None, from_end=True)
    keeper.start()
    try:
        signal.pause()
    except KeyboardInterrupt:
        keeper.stop()


def _greet(data_dir: DataDir, *, as_json: bool, note: str) -> None:
    """Print the state and the addresses of a running stack and, if it has a gateway, first requests."""
    status = read_status(data_dir)
    endpoints = Endpoints.load(data_dir.endpoints_file)
    if endpoints is None:
        raise StackError(note)
    key_file = data_dir.root / KEY_FILE
    write_env_files(data_dir, endpoints)
    serves = bool(endpoints.gateway_url and endpoints.postgres_owner_dsn)
    key, is_new = demo_key(data_dir, endpoints.postgres_owner_dsn) if serves else ("", False)
    if as_json:
        found = {**status.as_json(), "endpoints": endpoints.masked(), "demo_key_file": str(key_file) if key else None}
        print(json.dumps(found), flush=True)
        return
    print_status(status)
    print(f"\n{addresses(endpoints)}\n")
    if serves:
        print(first_requests(data_dir, endpoints, key if is_new else None))
    print(f"Logs: {data_dir.logs}\nPasswords of Postgres: {data_dir.postgres / 'passwords.json'}\n{note}", flush=True)


def _stop_on_signals(supervisor: Supervisor) -> list[int]:
    """Stop in order at the first signal, at once at the second; returns the list into which the signals go."""
    asked: list[int] = []

    def handle(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)
        supervisor.request_stop(now=len(asked) > 1)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, handle)
    return asked


COLOURS = (
    *("cyan", "green", "yellow", "magenta", "blue"),
    *("bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_blue"),
)
"""Of the prefixes, in the order in which processes first say something."""


class Console:
    """Writes whole lines, from any thread. ``follow``: whether lines of logs are shown at all."""

    def __init__(self, out: TextIO | None = None, *, follow: bool = True) -> None:
        self._out = RichConsole(file=out, highlight=False, soft_wrap=True)
        self._colour_of: dict[str, str] = {}
        self._follow = follow
        self._following = False

    def report(self, name: str, message: str) -> None:
        """Show what happened to a process."""
        first, *rest = message.splitlines() or [""]
        self._write(name, first, "bold")
        for line in rest:
            self._write(name, line)

    def log_line(self, name: str, line: str) -> None:
        """Show a line of a log, once `begin_to_follow` was called; before that the logs only hold how servers start."""
        if self._following:
            self._write(name, line)

    def begin_to_follow(self) -> None:
        """Show the logs from now on, if they are to be shown."""
        self._following = self._follow

    def _write(self, name: str, text: str, style: str = "") -> None:
        colour = self._colour_of.setdefault(name, COLOURS[len(self._colour_of) % len(COLOURS)])
        self._out.print(Text.assemble((f"{name:<20} | ", colour), (text, style)))


def print_status(status: StackStatus) -> None:
    """Print the parts of a stack as a table."""
    if not status.running:
        print(f"no stack is running in {status.data_dir}")
        return
    table = Table(title=f"Fairlane in {status.data_dir}, supervisor {status.supervisor_pid}", title_justify="left")
    for column in ("part", "state", "pid", "deaths", "address", "health"):
        table.add_column(column, overflow="fold")
    for part in status.parts:
        health = "-" if part.problem is None and not part.checked else (part.problem or "ok")
        pid = "" if part.pid is None else str(part.pid)
        table.add_row(part.name, part.state, pid, str(part.deaths), part.address, health)
    RichConsole().print(table)


KEY_FILE = "demo-key"
"""In the data directory, readable by its owner only."""
KEY_NAME = "demo (make up)"
OPERATOR_ENV = "operator.env"


def demo_key(data_dir: DataDir, owner_dsn: str) -> tuple[str, bool]:
    """The key of the demo's tenant, and whether it was made now. One that was revoked or has no row is replaced. Raises
    StackError: Postgres refuses to make one."""
    file = data_dir.root / KEY_FILE
    tenant = demo_tenant()
    try:
        with ApiKeys(owner_dsn) as keys:
            if file.exists():
                text = file.read_text(encoding="utf-8").strip()
                if any(key.key_id in text for key in keys.list(tenant)):
                    return text, False
            text = keys.create(tenant, KEY_NAME).text
    except ApiKeysError as error:
        raise StackError(f"no key for {tenant}: {error}") from None
    write_private(file, text)
    return text, True


def demo_tenant() -> str:
    """The first tenant of deploy/tenants.yaml."""
    return load_tenants(TENANTS_FILE)[0].tenant


def demo_model() -> str:
    """The first model of deploy/models.yaml that generates text."""
    return next(model.model for model in load_models(MODELS_FILE) if Task.GENERATE in model.tasks)


def addresses(endpoints: Endpoints) -> str:
    """One line per part, passwords masked."""
    lines = {
        "gateway": endpoints.gateway_url,
        "admin": endpoints.admin_url,
        "kafka": endpoints.kafka_bootstrap_servers,
        "postgres": mask(endpoints.postgres_dsn(PostgresRole.OPERATOR)),
        "redis": mask(endpoints.redis_url),
        "cache": mask(endpoints.redis_cache_url),
        "files": endpoints.files_url,
    }
    return "\n".join(f"  {name:<9} {address}" for name, address in lines.items() if address)


def write_env_files(data_dir: DataDir, endpoints: Endpoints) -> None:
    """Write the environments of an operator and of the demo's tenant; none for a stack whose users are not made yet."""
    tenant = demo_tenant()
    try:
        found = {
            OPERATOR_ENV: endpoints.operator_env(KafkaUser(KafkaRole.OPERATOR).name) | endpoints.owner_env,
            f"{tenant}.env": endpoints.kafka_env(KafkaUser(KafkaRole.TENANT, tenant).name),
        }
    except StackError:
        # `--bare`: nobody but the administrator has a user.
        return
    data_dir.env.mkdir(exist_ok=True)
    for name, env in found.items():
        lines = (f"{variable}={shlex.quote(value)}\n" for variable, value in sorted(env.items()))
        write_private(data_dir.env / name, "".join(lines))


def first_requests(data_dir: DataDir, endpoints: Endpoints, new_key: str | None) -> str:
    """A call of the gateway with curl, and the same request over Kafka in Python; both run as they are.

    ``new_key``: the key, if it was made now: it is shown this once.
    """
    tenant, model = demo_tenant(), demo_model()
    key_file = data_dir.root / KEY_FILE
    shown = f"Key of tenant {tenant}, shown once:\n  {new_key}\n" if new_key else ""
    return f"""{shown}It is in {key_file}. A first request:

  curl -s {endpoints.gateway_url}/v1/chat/completions \\
    -H "Authorization: Bearer $(cat {key_file})" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "max_tokens": 16,
         "messages": [{{"role": "user", "content": "Say hello."}}]}}'

The same over Kafka, with {PROJECT_ROOT / ".venv/bin/python"}:

  set -a; . {data_dir.env / tenant}.env; set +a

  from fairlane import Client
  with Client("{tenant}") as client:
      model = "{model}"
      handle = client.submit(model=model, prompt="Hello", max_tokens=16)
      print(handle.result(60).output.text)

For `fairlane top`, `fairlane explain ID` and the like:

  set -a; . {data_dir.env / OPERATOR_ENV}; set +a
"""


def main() -> None:
    """Run the command line; a problem is a line on stderr (and maybe the end of a log), and exit status 1."""
    try:
        app()
    except StackError as error:
        sys.exit(f"fairlane: {error}")


if __name__ == "__main__":
    main()
