"""No text of a request appears in a log of any part of the stack, in a list of dead letters over HTTP, or in a core
file.

The whole secured stack with an edge in front. An address and a key are planted in answers from the cache,
conversations, documents and dead letters that are replayed, of a tenant with guardrails and one without; the process of
a check is ended by a signal that leaves a core file elsewhere.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import psutil
import pytest

from deploy.local.__main__ import demo_model
from deploy.local.layout import PROJECT_ROOT, DataDir
from deploy.local.services import default_services, default_setup
from deploy.local.stack import LocalStack
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.api_keys.key_store import ApiKeys
from tests.kit.nginx_kit import Edge, edge, needs_nginx
from tests.kit.troubled_engine import POISON
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model, needs_nginx]

ADDRESS = "planted.person@example.com"
KEY = "AKIAQX7PLN4TEDLE6K77"
TEXT = f"I am {ADDRESS} and my key is {KEY}"
PLANTED = (ADDRESS, KEY, "planted.person", "QX7PLN4TEDLE6K77")
TENANTS = """
tenants:
  - tenant: acme
    weight: 1
    guardrails:
      input:
        - {check: patterns, action: redact}
        - {check: secrets, action: block}
      output:
        - {check: patterns, action: log}
      patterns: ['planted[.]person@[a-z.]+']
  - tenant: globex
    weight: 1
"""
END_S = 180.0
OF_SERVICES = ("stream_processors.", "producers.", "inference_consumers", "tests.kit.troubled_")


@dataclass(frozen=True)
class Site:
    """The running stack, its edge, and a key of each tenant and of an operator."""

    stack: LocalStack
    edge: Edge
    keys: dict[str, str]

    def client(self, tenant: str) -> httpx.Client:
        return self.edge.client({"authorization": f"Bearer {self.keys[tenant]}"})

    def admin(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.keys[DEPLOYMENT]}"}
        return httpx.Client(base_url=f"{self.stack.endpoints.admin_url}/v1/admin", headers=headers, timeout=END_S)

    def processes(self) -> list[psutil.Process]:
        """Of our services, with those that they started; by the command line of each."""
        found = []
        for process in psutil.Process().children(recursive=True):
            line = process.cmdline()
            if any(word.startswith(OF_SERVICES) for word in line):
                found.append(process)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("leaks-of-the-stack")
    (folder / "tenants.yaml").write_text(TENANTS)
    setup = [
        replace(step, env={**step.env, "TENANTS_FILE": str(folder / "tenants.yaml")})
        for step in default_setup(DataDir(folder / "stack").credentials)
    ]
    services = [
        replace(
            one,
            # Its engines break on a prompt that says so.
            arguments=("-m", "tests.kit.troubled_consumer", *one.arguments[2:])
            if "inference_consumers" in one.arguments
            else one.arguments,
            env={**one.env, "LOG_LEVEL": "DEBUG", "RETRIEVAL_BUDGET_MS": "5000"},
        )
        for one in default_services(engine="simulated")
    ]
    with LocalStack(data_dir=folder / "stack", secured=True, setup=setup, services=services, environ={}) as stack:
        with ApiKeys(stack.endpoints.postgres_owner_dsn) as keys:
            made = {tenant: keys.create(tenant, "tests").text for tenant in ("acme", "globex")}
            made[DEPLOYMENT] = keys.create(DEPLOYMENT, "tests", Role.OPERATOR).text
        with edge(folder / "edge", [urlsplit(stack.endpoints.gateway_url).netloc]) as running:
            yield Site(stack, running, made)


@pytest.fixture(scope="module")
def used(site: Site) -> Site:
    """After everything was sent and answered."""
    for tenant in ("acme", "globex"):
        with site.client(tenant) as client:
            chats(client)
            cached(client)
            conversation(client)
            documents(client)
            poison(client)
    end_checks(site)
    with site.client("acme") as client:
        assert chat(client, f"I am {ADDRESS} again").status_code == 200, "another process took its place"
    replay(site)
    return site


def chat(client: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    body = {"model": demo_model(), "max_tokens": 4, "messages": [{"role": "user", "content": text}], **fields}
    return client.post("/v1/chat/completions", json=body)


def ask(client: httpx.Client, prompt: str, **fields: Any) -> dict[str, Any]:
    """The result of a request of Fairlane's own."""
    body = {"model": demo_model(), "input": {"prompt": prompt}, "parameters": {"max_tokens": 4}, **fields}
    accepted = client.post("/v1/requests", json=body)
    assert accepted.status_code < 300, accepted.text
    path = f"/v1/results/{accepted.json()['id']}"
    eventually(lambda: client.get(path).status_code == 200, END_S, "a result")
    result: dict[str, Any] = client.get(path).json()
    return result


def chats(client: httpx.Client) -> None:
    for text in (TEXT, f"I am {ADDRESS}", f"my key is {KEY}"):
        chat(client, text)
        chat(client, text, stream=True)
    chat(client, TEXT, max_tokens=TEXT)
    client.post("/v1/chat/completions", content=f'{{"messages": "{TEXT}'.encode())


def cached(client: httpx.Client) -> None:
    """The same question until its answer comes from the cache."""

    def is_cached() -> bool:
        answer = chat(client, f"who is {ADDRESS}?", temperature=0, fairlane={"cache": "exact"})
        assert answer.status_code == 200, answer.text
        assert leaks(repr(answer.headers)) == []
        return answer.json()["fairlane"]["cache"] is not None

    eventually(is_cached, END_S, "an answer from the cache")


def conversation(client: httpx.Client) -> None:
    name = str(uuid4())
    for text in (f"I am {ADDRESS}", "who am I?"):
        assert chat(client, text, fairlane={"conversation_id": name}).status_code == 200


def documents(client: httpx.Client) -> None:
    """A document with the text in it, and a question that it answers."""

    def is_made() -> bool:
        # The embedder is announced when it is loaded.
        return client.post("/v1/collections", json={"name": "people"}).status_code in (201, 409)

    eventually(is_made, END_S, "a collection")
    path = "/v1/collections/people/documents"
    assert client.post(path, files={"file": ("people.txt", TEXT.encode())}).status_code == 202

    def is_ingested() -> bool:
        return {one["status"] for one in client.get(path).json()["data"]} == {"done"}

    eventually(is_ingested, END_S, "the ingestion")
    for _ in range(2):
        ask(client, "Who has a key?", retrieval={"collection": "people", "top_k": 1})


def poison(client: httpx.Client) -> None:
    """An engine breaks on a request until it is a dead letter. Its key would be blocked, its address is redacted."""
    result = ask(client, f"{POISON}: I am {ADDRESS}", metadata={"note": ADDRESS})
    assert result["code"] == "poison", result


def end_checks(site: Site) -> None:
    """As a library that crashes: SIGSEGV would leave a core file."""
    checks = [one for one in site.processes() if "inference_consumers.guardrails.process" in one.cmdline()]
    assert checks
    for one in checks:
        os.kill(one.pid, signal.SIGSEGV)


def replay(site: Site) -> None:
    """Under the guardrails of its tenant, if it has any."""
    with site.admin() as admin:
        for tenant in ("acme", "globex"):
            answer = admin.post("/dead-letters/replay", json={"dry_run": False, "tenant": tenant})
            assert answer.status_code == 200, answer.text
            assert leaks(answer.text) == []
            assert [one["result"] for one in answer.json()["results"]] == ["replayed"]

        def is_dead_again() -> bool:
            return len(letters(admin)) >= 4

        eventually(is_dead_again, END_S, "the dead letters of the replays")


def letters(admin: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = admin.get("/dead-letters", params={"topic": "work"}).json()["data"]
    return found


def leaks(sink: str | bytes) -> list[str]:
    data = sink.encode() if isinstance(sink, str) else sink
    return [text for text in PLANTED if text.encode() in data]


def logs_of(site: Site) -> list[Path]:
    """Of every process of the stack and of the edge: services, Kafka, Postgres, Redis and NGINX."""
    return sorted([*site.stack.data_dir.logs.rglob("*.log*"), site.edge.nginx.log_file, site.edge.nginx.access_log])


def test_no_log_of_the_stack_has_text(used: Site) -> None:
    logs = logs_of(used)
    names = {path.stem for path in logs}
    for part in ("kafka", "postgres", "redis", "gateway-1", "admin-1", "ingest-1", "dispatcher-1", "nginx", "access"):
        assert any(part in name for name in names), (part, names)
    for path in logs:
        assert leaks(path.read_bytes()) == [], path.name


def test_the_search_finds_what_is_there(used: Site) -> None:
    """The text is where it belongs: in Kafka and in Postgres."""
    for folder in (used.stack.data_dir.kafka, used.stack.data_dir.postgres):
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert any(leaks(path.read_bytes()) for path in files), folder.name


def test_no_list_of_dead_letters_has_text(used: Site) -> None:
    with used.admin() as admin:
        listed = admin.get("/dead-letters")
        assert {one["tenant"] for one in letters(admin)} == {"acme", "globex"}
        assert leaks(listed.content) == []
        for one in listed.json()["data"]:
            topic = "work" if one["topic"].endswith("work") else "requests"
            place = f"/dead-letters/{topic}/{one['partition']}/{one['offset']}"
            whole = admin.get(place)
            assert whole.status_code == 200, whole.text
            assert leaks(whole.content) == []
            assert admin.get(f"{place}/payload").status_code == 403


def test_no_process_of_ours_may_leave_a_core_file_and_none_is_left(used: Site) -> None:
    processes = used.processes()
    lines = [" ".join(process.cmdline()) for process in processes]
    for part in (
        "dispatcher",
        "recorder",
        "gateway",
        "admin",
        "backfill",
        "ingest",
        "consumer",
        "engine",
        "guardrails",
    ):
        assert any(part in line for line in lines), part
    for process, line in zip(processes, lines, strict=True):
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0), line
    for folder in (PROJECT_ROOT, used.stack.data_dir.root):
        assert [path for path in folder.glob("core*") if path.is_file()] == []
