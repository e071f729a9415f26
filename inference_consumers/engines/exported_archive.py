"""Check that an exported program holds nothing but model operations; ``torch.export.load`` does not check.

The loader runs or imports several parts of an archive (``.pt2``): pickles (weights, constants, objects, sample inputs),
compiled libraries, expressions and guards (evaluated as Python), names of called functions (anything inside torch), and
modules named by the structure of its arguments. What is not on a list here is refused before torch looks at it.
"""

import ast
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UnsafeArchiveError(Exception):
    """Loading the archive could run code; the message names the part."""


_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_PARTS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/version|\.data/serialization_id|\.format_version"
    r"|\.storage_alignment|data/weights/weight_\d+|data/constants/tensor_\d+"
    r"|" + "|".join(map(re.escape, (_PROGRAM, _SAMPLES, *_CONFIGS)))
)

# What a program calls: operators on tensors, and arithmetic on their sizes.
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|quantized|quantized_decomposed)\.\w+(\.\w+)?"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond|while_loop|map_impl|scan)"
    r"|_operator\.(add|sub|mul|truediv|floordiv|mod|neg|pos|abs|eq|ne|lt|le|gt|ge|and_|or_|getitem|pow)"
    r"|math\.(ceil|floor|trunc|sqrt|prod)|torch\.sym_(int|float|max|min|not|sum|ite|sqrt)|torch\._sym_sqrt"
)
# Of these operators, the ones that read or write files.
_FILES = re.compile(r"torch\.ops\.aten\.(from_file|save)\b.*")

# What expressions of sizes and guards on them are made of; no name that begins with an underscore, no other attribute.
_NODES = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Subscript, ast.Attribute,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_CALLED = frozenset(
    {
        *("Symbol", "Integer", "Float", "Rational", "Pow", "Add", "Mul", "Max", "Min", "Eq", "Ne", "Lt", "Le"),
        *("Gt", "Ge"),
        *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv"),
        *("LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt"),
        *("RoundToInt", "RoundDecimal", "ToFloat", "Identity", "IsNonOverlappingAndDenseIndicator"),
    }
)  # fmt: skip
_ATTRIBUTES = frozenset({"size", "shape", "ndim"})

# The structure of arguments and results, as torch.utils._pytree writes it: JSON in JSON in JSON.
_SPECS = frozenset({"in_spec", "out_spec"})
_SPEC_PROTOCOL = 1
_CONTAINERS = frozenset(
    {
        None,
        *("builtins.tuple", "builtins.list", "builtins.dict"),
        *("torch.fx.immutable_collections.immutable_list", "torch.fx.immutable_collections.immutable_dict"),
    }
)  # fmt: skip


def check_exported(file: Path) -> None:
    """Raises UnsafeArchiveError, and errors of torch for a file that is no such archive: one of an older form, for
    instance, which ``torch.export.load`` would read as a zip file of pickles."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    # torch's own reader, so that the check sees the same archive as the loader.
    with PT2ArchiveReader(str(file)) as archive:
        names = archive.get_file_names()
        for name in names:
            if _PARTS.fullmatch(name) is None:
                raise UnsafeArchiveError(f"it holds {_shown(name)}")
        for config in _CONFIGS:
            if config in names:
                _check_config(config, archive.read_bytes(config))
        if _SAMPLES in names:
            _check_samples(archive.read_bytes(_SAMPLES))
        if _PROGRAM in names:
            _check_program(json.loads(archive.read_bytes(_PROGRAM)))


def _check_config(name: str, content: bytes) -> None:
    entries = json.loads(content)["config"]
    for entry in entries.values():
        part = str(entry.get("path_name"))
        if entry.get("use_pickle") is not False or re.fullmatch(r"(weight|tensor)_\d+", part) is None:
            raise UnsafeArchiveError(f"{name} names a pickle, {_shown(part)}")


def _check_samples(content: bytes) -> None:
    """torch tries it without code first, and then with."""
    import torch

    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:
        raise UnsafeArchiveError(f"{_SAMPLES} is a pickle of more than tensors") from error


def _check_program(program: Any) -> None:
    for guard in program.get("guards_code") or ():
        _check_expression("a guard", guard)
    for part in _parts(program):
        for key, value in part.items():
            _check_strings(key, value)
        if "expr_str" in part:
            _check_expression("an expression", part["expr_str"])
        if "target" in part and "inputs" in part:
            target = str(part["target"])
            if _OPERATOR.fullmatch(target) is None or _FILES.fullmatch(target) is not None:
                raise UnsafeArchiveError(f"the program calls {_shown(target)}")


def _check_strings(key: str, value: Any) -> None:
    """Structures are allowed only where they belong: other parts of torch would parse them as well."""
    if key in _SPECS and value:
        _check_spec(value)
        return
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and _is_like_a_spec(text):
            raise UnsafeArchiveError(f"{_shown(key)} of the program is {_shown(text)}")


def _is_like_a_spec(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    except RecursionError:
        return True
    return isinstance(found, list) and len(found) == 2 and isinstance(found[1], dict)


def _check_spec(text: Any) -> None:
    try:
        protocol, spec = json.loads(text)
        waiting = [spec]
        while waiting:
            node = waiting.pop()
            context = None if node["context"] is None else json.loads(node["context"])
            is_plain = context is None or (isinstance(context, list) and {*map(type, context)} <= {str})
            if protocol != _SPEC_PROTOCOL or node["type"] not in _CONTAINERS or not is_plain:
                raise UnsafeArchiveError(f"a structure of the program is more than lists and names: {_shown(text)}")
            waiting.extend(node["children_spec"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnsafeArchiveError(f"a structure of the program is none: {_shown(str(text))}") from error


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _check_expression(what: str, text: Any) -> None:
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise UnsafeArchiveError(f"{what} of the program is none: {_shown(str(text))}") from error
    for node in ast.walk(tree):
        if not _is_harmless(node):
            raise UnsafeArchiveError(f"{what} of the program may run code: {_shown(str(text))}")


def _is_harmless(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _CALLED
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _ATTRIBUTES
        case ast.Name(id=name):
            return not name.startswith("_")
        case ast.Attribute(attr=name):
            return name in _ATTRIBUTES
        case ast.Constant(value=str(text)):
            # A symbol's name, or that of an input in a guard.
            return re.fullmatch(r"\w{0,64}", text) is not None
        case _:
            return isinstance(node, _NODES) and not isinstance(node, ast.Call)


def _shown(text: str) -> str:
    return repr(text[:80])
