"""By which mechanism a value broke: rules over what was seen, each with its sentence, ways out, and a public source."""

from __future__ import annotations

from dataclasses import dataclass

from overflow_lab.analysis.index import Index
from overflow_lab.recording import EventRow

CAST = "aten._to_copy"
# The mechanism of a NaN that has nothing to do with precision.
NAN_ANYWAY = "nan-in-any-precision"


@dataclass(frozen=True)
class Mechanism:
    """A mechanism: its name in verdicts, what happens, the usual ways out, and a public report of it."""

    name: str
    what: str
    ways_out: str
    source: str


_HF, _TORCH = "https://github.com/huggingface/transformers", "https://github.com/pytorch/pytorch"
MECHANISMS = {
    m.name: m
    for m in (
        Mechanism(
            "matmul-overflow",
            "a sum of products leaves the format's range though every factor is ordinary",
            "keep the layer in float32, or scale its weights down and the next layer's up",
            f"{_HF}/issues/5651",
        ),
        Mechanism(
            "attention-score",
            "query times key leaves the range before it is scaled or softmaxed",
            "scale the query before the product, compute scores in float32, or use a fused attention",
            f"{_HF}/pull/28163",
        ),
        Mechanism(
            "residual-stream",
            "the residual stream and its branch do not fit together",
            "bfloat16, or a rescale of the whole residual stream; a few layers in float32 do not help",
            f"{_HF}/pull/37226",
        ),
        Mechanism(
            "square-in-norm",
            "a hand-written norm squares values in the activations' own dtype",
            "compute the norm in float32",
            "https://github.com/neuroneural/brainchop-cli/pull/56",
        ),
        Mechanism(
            "gated-product",
            "a product leaves the range: of a gate and its branch, or of a value and its scale",
            "keep the product in float32, or scale the linear branch down and the next layer's weights up",
            "https://github.com/vllm-project/vllm/pull/13232",
        ),
        Mechanism(
            "long-reduction",
            "a sum over many elements leaves the range or stands still",
            "accumulate in float32",
            "https://github.com/vadimkantorov/convasr/pull/73",
        ),
        Mechanism(
            "constant-does-not-fit",
            "a constant that the program writes does not fit the format",
            "take the constant from torch.finfo(dtype)",
            "https://github.com/facebookresearch/fairseq/issues/3575",
        ),
        Mechanism(
            "mask-arithmetic",
            "a mask constant near the limit meets arithmetic that takes it beyond",
            "select with torch.where or masked_fill instead of adding or multiplying",
            f"{_HF}/pull/17306",
        ),
        Mechanism(
            "eps-flushed",
            "a small constant added for safety is zero in this format",
            "a larger eps, or this computation in float32",
            "https://github.com/wenet-e2e/wenet/pull/907",
        ),
        Mechanism(
            "flushed-to-zero",
            "values below the format's smallest magnitude became zero",
            "scale the values up, or keep this computation in float32",
            "https://arxiv.org/abs/1710.03740",
        ),
        Mechanism(
            "cast-parameter",
            "a weight loses its value in the cast",
            "keep this parameter in float32",
            "https://github.com/Linaom1214/TensorRT-For-YOLO-Series/issues/56",
        ),
        Mechanism(
            "cast-buffer",
            "a buffer loses its value in the cast",
            "keep this buffer in float32: register it so that .to() leaves it, or compute it anew",
            "https://github.com/NVIDIA-NeMo/Automodel/pull/2549",
        ),
        Mechanism(
            "cast-input",
            "an input loses its value in the cast",
            "pass this input in float32 and cast later",
            "https://github.com/modelscope/DiffSynth-Studio/pull/1025",
        ),
        Mechanism(
            "cast-activation",
            "a value computed wider does not survive the cast back",
            "stay in the wider dtype one operation longer",
            "https://github.com/Blaizzy/mlx-vlm/pull/293",
        ),
        Mechanism(
            "exp-overflow",
            "the exponential leaves the range",
            "subtract the maximum first, or compute in float32",
            "https://github.com/facebookresearch/xformers/pull/98",
        ),
        Mechanism(
            "position-rounding",
            "positions, counts or indices above the format's exact integers are rounded",
            "compute positions in integers or float32",
            "https://github.com/Nerogar/OneTrainer/issues/1177",
        ),
        Mechanism(
            "swamped-add",
            "what is added is below half a unit in the last place of what it is added to",
            "accumulate in float32",
            "https://arxiv.org/abs/1710.03740",
        ),
        Mechanism(
            "cancellation",
            "nearly equal terms leave little but their rounding",
            "subtract before squaring, or compute this in float32",
            "https://github.com/cellarium-ai/cellarium-ml/issues/113",
        ),
        Mechanism(
            "collapsed-constant",
            "values that differ by less than the format's spacing become one",
            "keep this function's result in float32",
            "https://github.com/huggingface/sentence-transformers/pull/3893",
        ),
        Mechanism(
            "dtype-dependent-constant",
            "the program takes a constant from the dtype, so another function is computed",
            "pass the constant explicitly",
            f"{_TORCH}/issues/189581",
        ),
        Mechanism(
            "tie",
            "scores that float32 tells apart become equal, and another choice is made",
            "compute these scores in float32",
            "https://github.com/RBLN-SW/vllm-rbln/pull/741",
        ),
        Mechanism(
            "masked-row",
            "a row has nothing left to choose from, and its softmax is NaN",
            "keep at least one element unmasked, and compare in float32",
            f"{_HF}/pull/17437",
        ),
        Mechanism(
            NAN_ANYWAY,
            "the operation has no value there in any precision",
            "mend the model or its inputs (an empty row of a mask, log or sqrt of a negative number, 0 / 0)",
            f"{_TORCH}/issues/41508",
        ),
        Mechanism(
            "kernel-missing",
            "torch has no kernel of this operation for the dtype on this device",
            "cast to float32 around this operation",
            f"{_TORCH}/issues/52291",
        ),
        Mechanism(
            "dtype-clash",
            "two dtypes meet that do not go together",
            "cast one of them",
            "https://github.com/huggingface/diffusers/issues/1931",
        ),
        Mechanism(
            "division",
            "a quotient leaves the range",
            "bound the divisor from below, or divide in float32",
            "https://github.com/NVIDIA/kvpress/pull/281",
        ),
        Mechanism(
            "rounding",
            "the format's rounding adds up to more than its own noise",
            "keep this module in float32",
            "https://arxiv.org/abs/1905.12322",
        ),
        Mechanism(
            "other", "an operation's result leaves the range", "keep this module in float32", f"{_HF}/issues/9295"
        ),
    )
}

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "matmul", "linear", "mv", "dot", "einsum", "addbmm"}
_SUMS = {
    "sum",
    "mean",
    "cumsum",
    "index_add",
    "scatter_add",
    "scatter_reduce",
    "logsumexp",
    "prod",
    "cumprod",
    "var",
    "norm",
}
_EXPONENTIALS = {"exp", "exp2", "expm1", "sinh", "cosh", "logaddexp"}
_CONSTANTS = {"masked_fill", "fill", "full", "full_like", "scalar_tensor", "where", "index_put", "clamp", "new_full"}
_SQUASHING = {"sigmoid", "tanh", "exp", "softmax", "_softmax", "erf", "log_sigmoid_forward", "silu"}
# No activation is this large: a constant of a mask is.
MASK = 1e6


def of_bad(found: Index, event: EventRow) -> str:
    """Return the mechanism of an event at which bad values were made."""
    op = event.op.removeprefix("aten.").rstrip("_")
    if event.op == CAST:
        return of_cast(found, event.detail) if event.detail else "cast-activation"
    if op in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
        return "masked-row"
    if event.value is not None and event.value >= MASK and op in ("add", "mul", "sub", "rsub"):
        return "mask-arithmetic"
    if op in ("bmm", "baddbmm") or (op in _MATMULS and "attention" in event.source):
        return "attention-score"
    return _by_operation(found.class_name(event.module), op)


def _by_operation(class_name: str, op: str) -> str:
    if op in _MATMULS:
        return "matmul-overflow"
    if op in ("pow", "square") or (op == "mul" and "norm" in class_name.lower()):
        return "square-in-norm"
    named = {"add": "residual-stream", "sub": "residual-stream", "mul": "gated-product", "div": "division"}
    if op in named:
        return named[op]
    for names, mechanism in (
        (_SUMS, "long-reduction"),
        (_EXPONENTIALS, "exp-overflow"),
        (_CONSTANTS, "constant-does-not-fit"),
    ):
        if op in names:
            return mechanism
    return "other"


def of_cast(found: Index, name: str) -> str:
    """Return the mechanism of a tensor that lost its value in the cast, by what the tensor is."""
    row = found.tensors.get(name)
    return f"cast-{row.role if row else 'input'}"


def of_unsupported(message: str) -> str:
    """Return the mechanism of an exception by what torch says."""
    text = message.lower()
    if "without overflow" in text:
        return "constant-does-not-fit"
    clashes = ("same dtype", "should be the same", "expected scalar type", "expected dtype", "mixed dtype")
    clash = any(said in text for said in clashes)
    return "dtype-clash" if clash else "kernel-missing"


def of_rounding(found: Index, op: str, detail: str, *, exact_to: float, largest: float, decides: bool) -> str:
    """Return the mechanism of an operation whose rounding makes the error; `largest` is that of its results."""
    bare = op.removeprefix("aten.").rstrip("_")
    if op == CAST:
        return of_cast(found, detail) if detail else "position-rounding" if largest > exact_to else "cast-activation"
    if bare in _SQUASHING:
        return "collapsed-constant"
    if bare in ("cumsum", "arange"):
        return "position-rounding"
    if bare in _SUMS or bare in ("add", "sub", "rsub"):
        return "swamped-add"
    return "tie" if decides else "rounding"
