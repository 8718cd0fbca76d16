"""The texts that are pasted: they run without overflow-lab, and give what our own islands give."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from overflow_lab.capture.precisions import parse_precision
from overflow_lab.remedies.islands.apply import apply
from overflow_lab.remedies.islands.members import Member
from overflow_lab.remedies.islands.snippets import node_prefix, onnx_types, patterns, snippets
from overflow_lab.subjects.demo import PROMPTS, folder
from tests import island_models as models
from tests import tiny_models


def texts(model: nn.Module, members: frozenset[Member], precision: str = "float16") -> dict[str, str]:
    return snippets(model, members, parse_precision(precision), alone=None)


def pasted(text: str) -> dict[str, Any]:
    assert "overflow_lab" not in text
    names: dict[str, Any] = {}
    exec(text, names)
    return names


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_wrapper_for_modules_gives_the_same_bits(precision: str) -> None:
    original, dtype = models.seeded(models.Layers), getattr(torch, precision)
    members = frozenset({Member("layers.1.norm"), Member("layers.3.norm")})
    x = models.values(2, 5, 8).to(dtype)
    ours = copy.deepcopy(original).to(dtype)
    apply(ours, original, members, parse_precision(precision))
    theirs = copy.deepcopy(original).to(dtype)
    pasted(texts(original, members, precision)["torch"])["keep_in_float32"](theirs, original)
    with torch.no_grad():
        assert torch.equal(theirs(x), ours(x))
        assert torch.isfinite(theirs(x)).all()


def test_the_wrapper_leaves_open_outputs_in_float32() -> None:
    original = models.seeded(models.Layers)
    members, x = frozenset({Member("layers.1.norm"), Member("head", open=True)}), models.values(2, 5, 8).half()
    ours, theirs = copy.deepcopy(original).half(), copy.deepcopy(original).half()
    apply(ours, original, members, parse_precision("float16"))
    pasted(texts(original, members)["torch"])["keep_in_float32"](theirs, original)
    with torch.no_grad():
        assert theirs(x).dtype == torch.float32
        assert torch.equal(theirs(x), ours(x))


def test_the_wrapper_for_autocast_gives_the_same_bits() -> None:
    original = models.seeded(models.Layers)
    members, x = frozenset({Member("layers.1.norm"), Member("layers.3.norm")}), models.values(2, 5, 8)
    ours, theirs = copy.deepcopy(original), copy.deepcopy(original)
    apply(ours, original, members, parse_precision("float16-autocast"))
    pasted(texts(original, members, "float16-autocast")["torch"])["keep_in_float32"](theirs, original)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(theirs(x), ours(x))
        assert torch.isfinite(theirs(x)).all()


def test_the_wrapper_keeps_what_is_shared_with_the_outside_apart() -> None:
    original = hf.AutoModelForSeq2SeqLM.from_pretrained(folder()).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder())
    inputs = tokenizer(list(PROMPTS[:4]), padding=True, return_tensors="pt")
    members = frozenset({Member("encoder")})
    ours, theirs = copy.deepcopy(original).half(), copy.deepcopy(original).half()
    apply(ours, original, members, parse_precision("float16"))
    pasted(texts(original, members)["torch"])["keep_in_float32"](theirs, original)
    start = torch.zeros(4, 3, dtype=torch.int64)
    with torch.no_grad():
        expected = ours(**inputs, decoder_input_ids=start).logits
        assert torch.equal(theirs(**inputs, decoder_input_ids=start).logits, expected)
    told = [model.generate(**inputs, num_beams=3, max_new_tokens=10) for model in (ours, theirs)]
    assert torch.equal(*told)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_the_wrapper_for_operations_gives_the_same_bits(precision: str) -> None:
    original, dtype = models.seeded(models.Streamed), getattr(torch, precision)
    stream = [Member(f"encoder.blocks.{i}", "aten.add") for i in (2, 3)]
    readers = [
        Member("encoder.blocks.3.norm", "aten.native_layer_norm"),
        Member("encoder.norm", "aten.native_layer_norm"),
    ]
    members = frozenset([*stream, *readers, Member("encoder.blocks.3.branch", "aten.addmm")])
    x = models.values(2, 5, 8).to(dtype)
    ours, theirs = copy.deepcopy(original).to(dtype), copy.deepcopy(original).to(dtype)
    apply(ours, original, members, parse_precision(precision))
    pasted(texts(original, members, precision)["torch"])["wide_operations"](theirs)
    with torch.no_grad():
        assert torch.equal(theirs(x), ours(x))
        assert torch.isfinite(theirs(x)).all()


def test_transformers_loader_keeps_exactly_the_weights_of_the_island(tmp_path: Path) -> None:
    path = tiny_models.save("t5", tmp_path)
    model = tiny_models.build("t5")
    members = frozenset({Member("encoder.block.1.layer.1.DenseReluDense")})
    text = texts(model, members)["transformers"]
    made = pasted("from transformers import T5ForConditionalGeneration\n" + text)["Mended"]
    low = made.from_pretrained(path, dtype=torch.float16)
    kept = {name for name, p in low.named_parameters() if p.dtype == torch.float32}
    own = {f"encoder.block.1.layer.1.DenseReluDense.{name}.weight" for name in ("wi", "wo")}
    assert own <= kept
    assert kept - own <= {name for name, _ in low.named_parameters() if ".wo." in name}


def test_patterns_match_no_other_module() -> None:
    names = ["encoder.block.1.wo.weight", "encoder.block.10.wo.weight", "decoder.encoder.block.1.wo.weight"]
    entry = patterns(["encoder.block.1"])[0]
    assert [name for name in names if re.search(entry, name)] == names[:1]


@pytest.mark.parametrize(
    ("alone", "said"), [(True, "here the list is enough"), (False, "use the wrapper too"), (None, None)]
)
def test_the_loaders_list_says_whether_weights_alone_are_enough(alone: bool | None, said: str | None) -> None:
    model = tiny_models.build("t5")
    members = frozenset({Member("encoder.block.1")})
    text = snippets(model, members, parse_precision("float16"), alone=alone)["transformers"]
    assert "must cast its own inputs" in text
    assert (said is None and "wrapper" not in text) or (said is not None and said in text)


def test_the_strict_list_is_for_bfloat16() -> None:
    text = texts(tiny_models.build("t5"), frozenset({Member("encoder.block.1")}), "bfloat16")["transformers"]
    assert "    _keep_in_fp32_modules_strict = [" in text


def test_a_plain_module_has_no_loader_list() -> None:
    assert "transformers" not in texts(models.seeded(models.Layers), frozenset({Member("layers.1")}))


class Exported(nn.Module):
    """What a TorchScript export of torch 2.13 was seen to name nodes of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"convs": nn.ModuleList([nn.Linear(4, 4)]), "skip": nn.Linear(4, 4)})
        self.nest = nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)])])
        self.seq = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("", "/"),
        ("blocks.convs.0", "/convs.0/"),
        ("blocks.skip", "/skip/"),
        ("nest.0.0", "/nest.0.0/"),
        ("seq.0.0", "/seq/seq.0/seq.0.0/"),
    ],
)
def test_nodes_are_named_as_the_exporter_names_them(path: str, prefix: str) -> None:
    assert node_prefix(Exported(), path) == prefix


def test_nodes_of_a_t5_block_begin_with_its_place() -> None:
    model = tiny_models.build("t5")
    assert node_prefix(model, "encoder.block.1.layer.1.DenseReluDense.wo") == (
        "/encoder/block.1/layer.1/DenseReluDense/wo/"
    )


def test_onnx_types_of_operations() -> None:
    assert onnx_types(["aten.bmm", "aten._softmax", "aten.mul", "aten.no_such"]) == ["MatMul", "Mul", "Softmax"]


class Entry:
    """A node of a graph, as onnx has it."""

    def __init__(self, name: str, op_type: str, scopes: list[str] | None = None) -> None:
        self.name, self.op_type = name, op_type
        self.metadata_props = [] if scopes is None else [Property("pkg.torch.onnx.name_scopes", repr(scopes))]


class Property:
    def __init__(self, key: str, value: str) -> None:
        self.key, self.value = key, value


def _inside(text: str) -> Any:
    """Return the function of the text that chooses nodes, without what needs onnx."""
    function = text[text.index("ISLANDS = [") : text.index("model = onnx.load")]
    return pasted("import ast\n" + function)["inside"]


def test_the_converters_list_chooses_the_nodes_of_the_island() -> None:
    model = tiny_models.build("t5")
    inside = _inside(texts(model, frozenset({Member("encoder.block.1")}))["onnx"])
    assert inside(Entry("/encoder/block.1/layer.0/SelfAttention/q/MatMul", "MatMul"))
    assert not inside(Entry("/encoder/block.0/layer.0/SelfAttention/q/MatMul", "MatMul"))
    assert not inside(Entry("/encoder/block.10/Add", "Add"))
    scopes = ["", "encoder", "encoder.block.1", "encoder.block.1.layer.0", "linear_8"]
    assert inside(Entry("node_linear_8", "MatMul", scopes))
    assert not inside(Entry("node_linear_8", "MatMul", ["", "encoder", "encoder.block.0", "linear_8"]))


def test_the_converters_list_chooses_operations_by_module_and_type() -> None:
    model = tiny_models.build("t5")
    members = frozenset({Member("encoder.block.1.layer.0.SelfAttention", "aten.bmm")})
    inside = _inside(texts(model, members)["onnx"])
    place = "/encoder/block.1/layer.0/SelfAttention"
    assert inside(Entry(f"{place}/MatMul_1", "MatMul"))
    assert not inside(Entry(f"{place}/Softmax", "Softmax"))
    assert not inside(Entry(f"{place}/q/MatMul", "MatMul"))


def test_tensorrt_is_told_layers_by_one_wildcard_each() -> None:
    text = texts(tiny_models.build("t5"), frozenset({Member("encoder.block.1")}))["tensorrt"]
    assert "--layerPrecisions='/encoder/block.1/*':fp32" in text
    assert "--precisionConstraints=obey" in text
