"""Islands as texts to paste: for transformers' loader, for plain torch, for ONNX converters and TensorRT."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from overflow_lab.capture.precisions import Precision
from overflow_lab.remedies.islands.members import Members, is_called, modules_of, open_of
from overflow_lab.remedies.islands.operations import MOVES
from overflow_lab.remedies.islands.wrappers import MODULES, OPERATIONS, filled

# What torch.onnx makes of an operation, by its ONNX type: for converters that are told types.
_ONNX = {
    "mm": "MatMul", "bmm": "MatMul", "addmm": "Gemm", "baddbmm": "MatMul", "matmul": "MatMul", "convolution": "Conv",
    "add": "Add", "sub": "Sub", "rsub": "Sub", "mul": "Mul", "div": "Div", "neg": "Neg", "abs": "Abs", "exp": "Exp",
    "log": "Log", "pow": "Pow", "sqrt": "Sqrt", "rsqrt": "Sqrt", "reciprocal": "Reciprocal", "sum": "ReduceSum",
    "mean": "ReduceMean", "amax": "ReduceMax", "_softmax": "Softmax", "_log_softmax": "LogSoftmax",
    "native_layer_norm": "LayerNormalization", "native_group_norm": "InstanceNormalization", "sigmoid": "Sigmoid",
    "tanh": "Tanh", "cumsum": "CumSum", "clamp": "Clip", "sin": "Sin", "cos": "Cos", "_to_copy": "Cast",
    "masked_fill": "Where", "where": "Where", "minimum": "Min", "maximum": "Max", "cumprod": "Loop",
    "native_batch_norm": "BatchNormalization", "_native_batch_norm_legit_no_training": "BatchNormalization",
    "linalg_vector_norm": "ReduceL2", "embedding": "Gather", "index_add": "ScatterElements", "erf": "Erf",
}  # fmt: skip


def snippets(model: nn.Module, members: Members, precision: Precision, *, alone: bool | None) -> dict[str, str]:
    """Return texts to paste, by what they are for.

    `alone` says whether float32 weights without casts at the border were enough in a forward; None: not tried.
    """
    found: dict[str, str] = {}
    paths = modules_of(members)
    operations = {m.module: sorted(o.op for o in members if o.op and o.module == m.module) for m in members if m.op}
    low = f"torch.{precision.dtype}"
    if paths:
        if hasattr(model, "_keep_in_fp32_modules") and precision.cast != "autocast":
            found["transformers"] = _transformers(model, paths, precision.dtype, alone)
        found["torch"] = filled(
            MODULES,
            names=_listed(paths),
            open=_listed(sorted(open_of(members))),
            low="None" if precision.cast == "autocast" else low,
        )
    if operations:
        label = "torch, operations" if paths else "torch"
        found[label] = filled(OPERATIONS, low=low, operations=_table(operations), moves=_set(MOVES))
    found["onnx"] = _onnx(model, paths, operations)
    found["tensorrt"] = _tensorrt(model, paths, operations)
    return found


def _listed(items: Iterable[str]) -> str:
    return json.dumps(list(items))


def _set(items: Iterable[str]) -> str:
    quoted = ", ".join(json.dumps(item) for item in sorted(items))
    return "{" + quoted + "}"


def _table(operations: Mapping[str, list[str]]) -> str:
    lines = "".join(f"    {json.dumps(m)}: {_set(ops)},\n" for m, ops in sorted(operations.items()))
    return "{\n" + lines + "}"


# ---- transformers ----


def patterns(paths: Iterable[str]) -> list[str]:
    """Return what matches the parameters below `paths`, and no others, in `_keep_in_fp32_modules`.

    transformers 5 joins the entries to one regular expression (a "*" is made ".*") and searches it in each parameter's
    whole name, so "wo" means every name with "wo" in it: these begin at the start and end at a dot.
    """
    return [f"^{re.escape(path)}\\." for path in paths]


def _transformers(model: Any, paths: tuple[str, ...], dtype: str, alone: bool | None) -> str:
    half = dtype == "float16"
    name = "_keep_in_fp32_modules" if half else "_keep_in_fp32_modules_strict"
    last = sorted({path.rpartition(".")[2] for path in paths})
    same = _same_names(model, last, paths)
    said = {
        True: "A forward with nothing but these weights in float32 was right: here the list is enough.",
        False: "These weights alone do not do here: the modules do not cast what they are given; use the wrapper too.",
        None: "",
    }[alone]
    lines = [
        f"# The loader keeps the weights whose names match in float32, when it is asked for {dtype}; `.to()` does not.",
        "# It keeps weights only: a module must cast its own inputs (and outputs), as T5's wo does, or dtypes clash.",
        *([f"# {said}"] if said else []),
        f"# Entries are regular expressions, searched in the names of parameters. {name}: "
        + ("for float16 only; _keep_in_fp32_modules_strict: for bfloat16 too." if half else "float16 and bfloat16."),
        f"class Mended({type(model).__name__}):",
        f"    {name} = {_listed(patterns(paths))}",
    ]
    if same:
        lines.append(f"    # or by last name, which here means the same modules: {_listed(last)}")
    own = sorted(getattr(model, name, None) or ())
    if own:
        lines.append(f"    # the class has its own, which this replaces; to keep them, add {_listed(own)}")
    return "\n".join([*lines, "", f"# Mended.from_pretrained(..., dtype=torch.{dtype})", ""])


def _same_names(model: nn.Module, last: list[str], paths: tuple[str, ...]) -> bool:
    """Return whether the last names match the parameters below `paths` and no others."""
    if any(name.isdigit() for name in last):
        return False
    names = [name for name, _ in model.named_parameters()]
    wanted = {name for name in names if any(name.startswith(f"{path}.") for path in paths)}
    return wanted == {name for name in names if any(re.search(entry, name) for entry in last)}


# ---- ONNX and TensorRT ----


def node_prefix(model: nn.Module, path: str) -> str:
    """Return what the names of a module's nodes begin with, as torch.onnx's TorchScript exporter writes them.

    Each module that is called adds its last name; an item of a list adds the list's name too: "/encoder/block.1/".
    """
    parts = path.split(".") if path else []
    made = []
    for end in range(1, len(parts) + 1):
        if is_called(model.get_submodule(".".join(parts[:end]))):
            begin = end - 1
            while begin and parts[begin].isdigit():
                begin -= 1
            made.append(".".join(parts[begin:end]))
    return "/" + "".join(f"{part}/" for part in made)


def _onnx(model: nn.Module, paths: tuple[str, ...], operations: Mapping[str, list[str]]) -> str:
    rows = [(node_prefix(model, path), path, None) for path in paths]
    own = [(node_prefix(model, path), path, onnx_types(ops)) for path, ops in sorted(operations.items())]
    table = "".join(f"    ({json.dumps(a)}, {json.dumps(b)}, {c}),\n" for a, b, c in [*rows, *own])
    types = sorted({kind for _, _, kinds in own for kind in kinds})
    return _ONNX_TEXT.format(table=table, types=_listed(types)) + (
        _ONNX_TYPES.format(types=_listed(types)) if types else ""
    )


def onnx_types(operations: Iterable[str]) -> list[str]:
    """Return the ONNX types that operations are exported as, those that are known."""
    bare = [operation.partition(".")[2].rstrip("_") for operation in operations]
    return sorted({_ONNX[name] for name in bare if name in _ONNX})


_ONNX_TEXT = """\
import ast

import onnx
from onnxconverter_common import float16

# (prefix of node names as the TorchScript exporter writes them, the module's path, ONNX types; None: all of them)
ISLANDS = [
{table}]


def inside(node):
    props = {{entry.key: entry.value for entry in node.metadata_props}}
    scopes = ast.literal_eval(props.get("pkg.torch.onnx.name_scopes", "[]"))  # the newer exporter's own record
    for prefix, path, types in ISLANDS:
        begins = node.name.startswith(prefix) and (types is None or "/" not in node.name[len(prefix) :])
        scoped = path in scopes if types is None else scopes[-2:-1] == [path]
        if (begins or scoped) and (types is None or node.op_type in types):
            return True
    return False


model = onnx.load("model.onnx")  # in float32
node_block_list = [node.name for node in model.graph.node if inside(node)]
model = float16.convert_float_to_float16(model, keep_io_types=True, node_block_list=node_block_list)
onnx.save(model, "model_float16.onnx")
"""
_ONNX_TYPES = """\
# Coarser, where node names were lost: all nodes of these types, wherever they are.
# op_block_list = [*float16.DEFAULT_OP_BLOCK_LIST, *{types}]
"""


def _tensorrt(model: nn.Module, paths: tuple[str, ...], operations: Mapping[str, list[str]]) -> str:
    specs = [f"{node_prefix(model, path)}*" for path in paths]
    for path, ops in sorted(operations.items()):
        specs += [f"{node_prefix(model, path)}{kind}*" for kind in onnx_types(ops)]
    trt = ",".join(f"'{spec}':fp32" for spec in specs)
    return _TRT_TEXT.format(specs=trt, names=" ".join(f"{spec}" for spec in specs))


_TRT_TEXT = """\
# TensorRT up to 10, whose layers are named after ONNX nodes. A name may hold one "*". Output types keep values wide.
trtexec --onnx=model.onnx --fp16 --precisionConstraints=obey \\
    --layerPrecisions={specs} \\
    --layerOutputTypes={specs}
# polygraphy takes whole names, one by one: --precision-constraints obey --layer-precisions NAME:float32 ...
# for the layers that match: {names}
# From TensorRT 11 on networks are strongly typed: convert the ONNX file with node_block_list, and build from that.
"""
