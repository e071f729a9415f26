"""The first screen of `make up`: every address whole, and a first request over HTTP and over Kafka, in 80 columns."""

from pathlib import Path

import yaml

from deploy.local.endpoints import Endpoints, mask
from deploy.local.errors import StackError
from deploy.local.layout import PROJECT_ROOT, DataDir, write_private
from deploy.local.services import MODELS_FILE
from fairlane_server.api_keys.key_store import ApiKeys, ApiKeysError

KEY_FILE = "demo-key"
"""In the data directory, readable by its owner only."""
KEY_NAME = "demo (make up)"
TENANTS_FILE = PROJECT_ROOT / "deploy" / "tenants.yaml"


def demo_key(data_dir: DataDir, owner_dsn: str) -> tuple[str, bool]:
    """The key of the demo's tenant, and whether it was made now. One that was revoked or has no row is replaced.

    Raises:
        StackError: Postgres refuses to make one.
    """
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
    return str(yaml.safe_load(TENANTS_FILE.read_text(encoding="utf-8"))["tenants"][0]["tenant"])


def demo_model() -> str:
    """The first model of deploy/models.yaml that generates text."""
    models = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    return next(str(model["model"]) for model in models if "generate" in model["tasks"])


def addresses(endpoints: Endpoints) -> str:
    """One line per part, passwords masked."""
    lines = {
        "gateway": endpoints.gateway_url,
        "kafka": endpoints.kafka_bootstrap_servers,
        "postgres": mask(endpoints.postgres_dsn),
        "redis": mask(endpoints.redis_url),
        "cache": mask(endpoints.redis_cache_url),
        "files": endpoints.files_url,
    }
    return "\n".join(f"  {name:<9} {address}" for name, address in lines.items() if address)


def first_requests(endpoints: Endpoints, key_file: Path, new_key: str | None) -> str:
    """A call of the gateway with curl, and the same request over Kafka in Python; both run as they stand.

    Args:
        endpoints: of the running stack.
        key_file: the file that holds the key.
        new_key: the key, if it was made now: it is shown this once.
    """
    tenant, model = demo_tenant(), demo_model()
    shown = f"Key of tenant {tenant}, shown once:\n  {new_key}\n" if new_key else ""
    return f"""{shown}It is in {key_file}. A first request:

  curl -s {endpoints.gateway_url}/v1/chat/completions \\
    -H "Authorization: Bearer $(cat {key_file})" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "max_tokens": 16,
         "messages": [{{"role": "user", "content": "Say hello."}}]}}'

The same over Kafka, with {PROJECT_ROOT / ".venv/bin/python"}:

  from fairlane import Client
  with Client("{tenant}", bootstrap_servers="{endpoints.kafka_bootstrap_servers}") as client:
      model = "{model}"
      handle = client.submit(model=model, prompt="Hello", max_tokens=16)
      print(handle.result(60).output.text)
"""
