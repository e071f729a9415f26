"""Start of a service's process."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT

SERVICES = (
    "producers/admin/__main__.py",
    "producers/backfill/__main__.py",
    "producers/gateway/__main__.py",
    "producers/ingest/app.py",
    "inference_consumers/__main__.py",
    "stream_processors/dispatcher/app.py",
    "stream_processors/recorder/app.py",
)


def test_a_service_and_its_children_leave_no_core_file() -> None:
    program = (
        "import os, resource, sys\n"
        "from fairlane.settings import Settings\n"
        "from fairlane_server.processes.start import begin_service\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))\n"
        "begin_service(Settings(), 'test')\n"
        "os.execv(sys.executable, [sys.executable, '-c', "
        "'import resource; print(resource.getrlimit(resource.RLIMIT_CORE))'])\n"
    )
    ran = subprocess.run(
        (sys.executable, "-c", program), cwd=PROJECT_ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "(0, 0)"


@pytest.mark.parametrize("module", SERVICES)
def test_every_service_begins_alike(module: str) -> None:
    text = (PROJECT_ROOT / Path(module)).read_text(encoding="utf-8")
    assert "begin_service(settings, " in text
    assert "logs.configure(" not in text
