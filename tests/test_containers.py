"""The one walk over arguments and outputs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from overflow_lab.subjects.containers import is_readable, map_tensors, tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any = None


class Strange:
    pass


def names(value: Any, **options: Any) -> list[str]:
    return [name for name, _ in tensors(value, "output", **options)]


ONE = torch.ones(2)
LEAVES = st.sampled_from([ONE, None, 3, "text", True, 2.5])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
    ),
    max_leaves=8,
)


def count(value: Any) -> int:
    """How many tensors a tree holds, counted in another way: by its printed form."""
    return repr(value).count("tensor(")


@given(TREES)
def test_every_tensor_of_a_tree_is_found_under_a_name_of_its_own(tree: Any) -> None:
    found = tensors(tree, "x")
    assert len(found) == count(tree)
    assert len({name for name, _ in found}) == len(found)


@given(TREES)
def test_names_are_expressions_that_lead_to_the_tensor(tree: Any) -> None:
    for name, tensor in tensors(tree, "x"):
        assert eval(name, {"x": tree}) is tensor


@given(TREES)
def test_a_mapped_tree_has_the_same_shape_and_other_tensors(tree: Any) -> None:
    before = repr(tree)
    mapped = map_tensors(lambda tensor: tensor * 2, tree)
    assert repr(mapped) == before.replace("1.", "2.")
    assert repr(tree) == before


def test_each_kind_of_container_names_its_parts() -> None:
    assert names(ONE) == ["output"]
    assert names((ONE, [ONE])) == ["output[0]", "output[1][0]"]
    assert names({"a": ONE, 1: ONE}) == ["output['a']", "output[1]"]
    assert names(Pair(ONE, None)) == ["output.left"]
    assert names(Record(ONE, {"k": ONE})) == ["output.first", "output.second['k']"]
    assert names(CausalLMOutput(logits=ONE, hidden_states=(ONE, ONE))) == [
        "output['logits']",
        "output['hidden_states'][0]",
        "output['hidden_states'][1]",
    ]
    assert names(torch.zeros(2, 2).max(0)) == ["output[0]", "output[1]"]


def cache(layers: int = 1) -> DynamicCache:
    made = DynamicCache()
    for layer in range(layers):
        made.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), layer)
    return made


def test_caches_are_walked_unless_they_are_left_out() -> None:
    assert names({"past": cache()}) == [
        "output['past'].layers[0].keys",
        "output['past'].layers[0].values",
    ]
    assert names({"past": cache()}, caches=False) == []
    assert len(names(EncoderDecoderCache(cache(), cache(2)))) == 6


def test_what_is_not_understood_is_named() -> None:
    unknown: set[str] = set()
    names([Strange(), (tensor for tensor in [ONE])], unknown=unknown)
    assert {name.rpartition(".")[2] for name in unknown} == {"Strange", "generator"}


@pytest.mark.parametrize("value", [None, 1, 2.0, True, "text", b"bytes", torch.float16, torch.Size([2]), len, {1, 2}])
def test_plain_values_are_passed_over_in_silence(value: Any) -> None:
    unknown: set[str] = set()
    assert names(value, unknown=unknown) == []
    assert unknown == set()


def test_a_list_that_holds_itself_ends() -> None:
    endless: list[Any] = [ONE]
    endless.append(endless)
    unknown: set[str] = set()
    assert len(names(endless, unknown=unknown)) < 20
    assert unknown == {"builtins.list"}


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "lazy": lambda: torch.nn.LazyLinear(2).weight,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_tensors_without_values_to_read_are_named_and_not_given(kind: str) -> None:
    tensor = UNREADABLE[kind]()
    unknown: set[str] = set()
    assert names([tensor], unknown=unknown) == []
    assert len(unknown) == 1


def test_a_fake_tensor_is_not_readable() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    assert not is_readable(fake)


def test_empty_and_one_element_tensors_are_readable() -> None:
    assert is_readable(torch.zeros(0, 3))
    assert is_readable(torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_gives_the_values_of_its_parts() -> None:
    parts = [torch.randn(3, 4), torch.randn(1, 4)]
    ((name, values),) = tensors(torch.nested.nested_tensor(parts), "output")
    assert name == "output"
    assert torch.equal(values.reshape(-1), torch.cat([part.reshape(-1) for part in parts]))


@pytest.mark.parametrize(
    "mapping",
    [
        {"f": ONE},
        collections.OrderedDict({1: ONE}),
        collections.defaultdict(lambda: ONE, {"f": ONE}),
        BatchEncoding({"f": ONE}),
    ],
)
def test_mappings_keep_their_class_and_their_keys_when_mapped(mapping: Any) -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, mapping)
    assert type(mapped) is type(mapping)
    assert list(mapped) == list(mapping)
    assert [value.tolist() for value in mapped.values()] == [[2.0, 2.0]]
    assert [value.tolist() for value in mapping.values()] == [[1.0, 1.0]]


@dataclasses.dataclass(frozen=True)
class Picky:
    """Cannot be made again by `dataclasses.replace`."""

    first: torch.Tensor
    scale: dataclasses.InitVar[float]
    second: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: float) -> None:
        object.__setattr__(self, "second", self.first * scale)


def test_a_dataclass_that_cannot_be_made_again_is_copied() -> None:
    mine = Picky(ONE, 3.0)
    with pytest.raises(ValueError, match="InitVar"):
        dataclasses.replace(mine)  # type: ignore[call-arg]
    mapped = map_tensors(lambda tensor: tensor + 1, mine)
    assert (mapped.first.tolist(), mapped.second.tolist()) == ([2.0, 2.0], [4.0, 4.0])
    assert (mine.first.tolist(), mine.second.tolist()) == ([1.0, 1.0], [3.0, 3.0])


def test_a_model_output_is_mapped_with_its_items() -> None:
    mapped = map_tensors(lambda tensor: tensor + 1, BaseModelOutput(last_hidden_state=ONE))
    assert isinstance(mapped, BaseModelOutput)
    assert mapped.last_hidden_state is mapped["last_hidden_state"]
    assert mapped[0].tolist() == [2.0, 2.0]


def test_a_packed_sequence_is_mapped_as_a_whole() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    mapped = map_tensors(lambda tensor: tensor.half() if tensor.is_floating_point() else tensor, packed)
    assert type(mapped) is type(packed)
    assert mapped.data.dtype is torch.float16
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)


def test_a_cache_is_copied_so_that_a_model_cannot_append_to_the_users() -> None:
    mine = cache()
    copied = map_tensors(lambda tensor: tensor.half(), mine)
    copied.update(torch.ones(1, 1, 1, 3).half(), torch.ones(1, 1, 1, 3).half(), 0)
    assert mine.get_seq_length() == 2
    assert copied.get_seq_length() == 3
    assert copied.layers[0].keys.dtype is torch.float16
    assert mine.layers[0].keys.dtype is torch.float32
