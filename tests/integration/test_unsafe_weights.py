"""Files of models that run code when they are loaded: refused without the flag, before anything of them runs."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fairlane.records import ModelVersion
from inference_consumers.engines.causal_lm import CausalLmEngine
from inference_consumers.engines.classifier import EXPORTED, TORCHSCRIPT, ClassifierEngine
from inference_consumers.engines.exported_archive import check_exported
from inference_consumers.engines.protocol import EngineLimits, EngineLoadError, EngineSpec
from inference_consumers.engines.registry import create_engine
from tests.kit.encoder_kit import prepared_tokenizer
from tests.kit.engine_kit import LANGUAGE_MODEL, THREADS, TINY, save_tiny_model
from tests.kit.engine_specs import spec_of
from tests.kit.vision_kit import save_exported, save_script

pytestmark = [pytest.mark.full, pytest.mark.model]

LIMITS = EngineLimits(max_batch_size=4, max_batch_tokens=1, max_context_tokens=1, max_output_tokens=0)
Edit = Callable[[dict[str, bytes]], None]


class Network(nn.Module):
    """With a constant, a buffer, sizes that are computed, and operators of several kinds."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
        self.register_buffer("mean", torch.full((1, 1, 1), 0.5))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            whole = (pixels - self.mean) * torch.tensor(2.0)
        halves = whole.reshape(pixels.shape[0] * 2, -1)
        result: torch.Tensor = self.layers(halves.reshape(pixels.shape[0], 1, 8, 8))
        return result


class Marks:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._mark,)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    save_exported(folder, Network(), ["dark", "bright"])
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def rewrite(folder: Path, edit: Edit) -> None:
    """The same archive with other parts; a part's name is that inside the archive's one folder."""
    file = folder / EXPORTED.file
    with zipfile.ZipFile(file) as archive:
        root = archive.namelist()[0].partition("/")[0]
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    edit(parts)
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(f"{root}/{name}" if not name.startswith("/") else name[1:], content)


def load(folder: Path, *, allowed: bool = False) -> ClassifierEngine:
    engine = ClassifierEngine(spec_of(folder, LIMITS, allow_unsafe_weights=allowed))
    engine.load()
    return engine


def in_program(change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(parts: dict[str, bytes]) -> None:
        program = json.loads(parts["models/model.json"])
        change(program)
        parts["models/model.json"] = json.dumps(program).encode()

    return edit


def first_expression(program: dict[str, Any], text: str) -> None:
    encoded = json.dumps(program)
    at = encoded.index('"expr_str": "') + len('"expr_str": "')
    changed = encoded[:at] + json.dumps(text)[1:-1] + encoded[encoded.index('"', at) :]
    program.update(json.loads(changed))


def result_structure(**fields: object) -> Edit:
    """That of what the program returns, with these fields."""
    spec = {"type": "builtins.list", "context": "null", "children_spec": []} | fields

    def change(program: dict[str, Any]) -> None:
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, spec])

    return in_program(change)


def imports(mark: Path) -> Edit:
    """A structure that imports a module, which leaves the mark."""
    (mark.parent / "marking.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n", encoding="utf-8")
    return result_structure(context=json.dumps({"__enum__": True, "fqn": "marking:os", "name": "x"}))


def calls(target: str) -> Edit:
    return in_program(lambda program: program["graph_module"]["graph"]["nodes"][1].update(target=target))


def torch_saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def pickled_weight(parts: dict[str, bytes], value: object) -> None:
    name = "data/weights/model_weights_config.json"
    config = json.loads(parts[name])
    first = next(iter(config["config"].values()))
    first["use_pickle"] = True
    parts[f"data/weights/{first['path_name']}"] = torch_saved(value)
    parts[name] = json.dumps(config).encode()


def test_a_program_as_torch_saves_it_is_loaded(folder: Path) -> None:
    check_exported(folder / EXPORTED.file)
    load(folder)
    rewrite(folder, lambda _parts: None)
    load(folder)


MARKING: dict[str, Callable[[Path], Edit]] = {
    "a weight": lambda mark: lambda parts: pickled_weight(parts, Marks(mark)),
    "sample inputs": lambda mark: (
        lambda parts: parts.update({"data/sample_inputs/model.pt": torch_saved(((Marks(mark),), {}))})
    ),
    "an expression": lambda mark: in_program(
        lambda program: first_expression(program, f"__import__('os').mkdir({str(mark)!r})")
    ),
    "a guard": lambda mark: in_program(
        lambda program: program.update(guards_code=[f"__import__('os').mkdir({str(mark)!r}) is None"])
    ),
    "a structure": imports,
    "weights of an older form": lambda mark: (
        lambda parts: parts.update({"data/weights/model.pt": torch_saved({"weight": Marks(mark)})})
    ),
}


@pytest.mark.parametrize("kind", MARKING)
def test_a_program_that_runs_code_when_it_is_loaded_is_refused_before_it_does(
    folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.syspath_prepend(tmp_path)
    rewrite(folder, MARKING[kind](mark))
    with pytest.raises(EngineLoadError, match=r"could run any code on this machine: .*ALLOW_UNSAFE_WEIGHTS"):
        load(folder)
    assert not mark.exists()
    # What it would have done: whether it can be loaded after that is another question.
    with pytest.raises(EngineLoadError):
        load(folder, allowed=True)
    assert mark.exists()


def opaque(parts: dict[str, bytes]) -> None:
    name = "data/constants/model_constants_config.json"
    config = json.loads(parts[name])
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config["config"]["thing"] = entry
    parts[name] = json.dumps(config).encode()
    parts["data/constants/opaque_obj_0"] = pickle.dumps("nothing bad")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (opaque, "it holds 'data/constants/opaque_obj_0'"),
        (lambda parts: pickled_weight(parts, torch.zeros(2)), "model_weights_config.json names a pickle"),
        (lambda parts: parts.update({"data/aotinductor/model/model.so": b""}), "it holds 'data/aotinductor"),
        (lambda parts: parts.update({"/version": b"8.0"}), "cannot be loaded: RuntimeError: .* not in a subdirectory"),
        (calls("torch.os.system"), "the program calls 'torch.os.system'"),
        (calls("torch.hub.load"), "the program calls 'torch.hub.load'"),
        (calls("torch.ops.aten.from_file.default"), "the program calls 'torch.ops.aten.from_file.default'"),
        (calls("torch.ops.mine.anything"), "the program calls"),
        (calls("#mine:anything"), "the program calls"),
        (calls("_operator.methodcaller"), "the program calls"),
        (in_program(lambda program: first_expression(program, "Add('__import__(1)', 2)")), "may run code"),
        (in_program(lambda program: first_expression(program, "(lambda: 1)()")), "may run code"),
        (in_program(lambda program: first_expression(program, "Symbol.__class__")), "may run code"),
        (in_program(lambda program: first_expression(program, "[x for x in y]")), "may run code"),
        (in_program(lambda program: first_expression(program, "1 +")), "an expression of the program is none"),
        (in_program(lambda program: program.update(guards_code=["open('x')"])), "a guard of the program may run code"),
        (result_structure(type="collections.defaultdict"), "more than lists and names"),
        (result_structure(context=json.dumps([{"__enum__": True}])), "more than lists and names"),
        (result_structure(children_spec=[{"type": None}]), "a structure of the program is none"),
        (in_program(lambda program: program.update(other='[1, {"type": null}]')), "'other' of the program is"),
    ],
)
def test_what_is_not_known_to_be_harmless_is_named(folder: Path, edit: Edit, said: str) -> None:
    rewrite(folder, edit)
    with pytest.raises(EngineLoadError, match=said):
        load(folder)


def test_guards_on_sizes_are_harmless(folder: Path) -> None:
    guard = "L['pixels'].size()[0] >= 1 and L['pixels'].shape[2] == 8"
    rewrite(folder, in_program(lambda program: program.update(guards_code=[guard])))
    check_exported(folder / EXPORTED.file)


def test_a_script_needs_the_flag(tmp_path: Path) -> None:
    save_script(tmp_path, nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), 2)
    model = ModelVersion("tiny", "1", "p", TORCHSCRIPT.engine, ("classify",), ".", 1, 0, max_batch_size=2)
    with pytest.raises(EngineLoadError, match=r"model\.pt is not loaded, .* it is a program of torch\.jit"):
        create_engine(EngineSpec(model, str(tmp_path), THREADS, device="cpu")).load()
    create_engine(EngineSpec(model, str(tmp_path), THREADS, device="cpu", allow_unsafe_weights=True)).load()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer(LANGUAGE_MODEL)


def test_pickled_weights_need_the_flag(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    from safetensors.torch import load_file

    save_tiny_model(tmp_path, tokenizer)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineLoadError, match=r"pytorch_model\.bin is not loaded, .* save the weights as safetensors"):
        CausalLmEngine(spec_of(tmp_path, TINY)).load()
    CausalLmEngine(spec_of(tmp_path, TINY, allow_unsafe_weights=True)).load()


def test_pickled_weights_beside_others_are_not_taken_for_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A loader looks for its own names: a file of another one must not hide a pickle."""
    save_tiny_model(tmp_path, tokenizer)
    mark = tmp_path / "mark"
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    torch.save({"weight": Marks(mark)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineLoadError, match="safetensors"):
        CausalLmEngine(spec_of(tmp_path, TINY)).load()
    assert not mark.exists()


def test_an_index_that_names_pickles_needs_the_flag(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    save_tiny_model(tmp_path, tokenizer)
    torch.save({}, tmp_path / "part.bin")
    index = {"metadata": {}, "weight_map": {"a": "part.bin"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(EngineLoadError, match=r"part\.bin is not loaded"):
        CausalLmEngine(spec_of(tmp_path, TINY)).load()
