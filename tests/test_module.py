from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import DynamicCache

from overflow_lab.errors import UsageError
from overflow_lab.subjects import Batch
from overflow_lab.subjects.module import from_module

Pair = namedtuple("Pair", ["left", "right"])


def linear() -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(2, 3)


def batches(inputs: Any) -> list[Batch]:
    return list(from_module(linear(), inputs).batches)


def test_loads_are_copies_and_the_module_stays_as_it_is() -> None:
    module = linear().train()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    subject = from_module(module, torch.ones(4, 2))
    for dtype in (None, torch.float16, torch.bfloat16):
        loaded = subject.load(dtype)
        assert loaded is not module
        assert {p.dtype for p in loaded.parameters()} == {dtype or torch.float32}
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.zero_()
    assert all(torch.equal(module.state_dict()[name], weight) for name, weight in before.items())
    assert module.training
    assert any("training mode" in note for note in subject.notes)


def test_the_dtype_is_the_one_the_module_has_and_load_brings_it_to_float32() -> None:
    subject = from_module(linear().to(torch.bfloat16), torch.ones(1, 2))
    assert subject.facts["dtype"] == "bfloat16"
    assert {p.dtype for p in subject.load(None).parameters()} == {torch.float32}


def test_complex_and_integer_buffers_survive_the_load_in_float32() -> None:
    module = linear()
    module.register_buffer("turn", torch.tensor([1 + 2j]))
    module.register_buffer("count", torch.tensor([3]))
    loaded = from_module(module.double(), torch.ones(1, 2)).load(None)
    buffers = dict(loaded.named_buffers())
    assert (buffers["count"].dtype, loaded.weight.dtype) == (torch.int64, torch.float32)
    kept = from_module(linear(), torch.ones(1, 2))
    assert kept.load(None).weight.dtype == torch.float32
    plain = linear()
    plain.register_buffer("turn", torch.tensor([1 + 2j]))
    assert dict(from_module(plain, torch.ones(1, 2)).load(None).named_buffers())["turn"].item() == 1 + 2j


@pytest.mark.parametrize("inputs", [{"input": torch.ones(4, 2)}, OrderedDict(input=torch.ones(4, 2))])
def test_a_mapping_is_keyword_inputs(inputs: Any) -> None:
    (batch,) = batches(inputs)
    assert (set(batch.inputs), batch.positional, batch.samples) == ({"input"}, (), 4)


def test_a_tuple_is_positional_inputs_and_a_tensor_one_of_them() -> None:
    (batch,) = batches((torch.ones(4, 2), 7))
    assert batch.positional[1] == 7
    (batch,) = batches(torch.ones(5, 2))
    assert (len(batch.positional), batch.samples) == (1, 5)


def test_a_list_is_one_batch_for_each_of_its_items() -> None:
    given = [{"input": torch.ones(1, 2)}, (torch.ones(2, 2),), torch.ones(3, 2), Batch(inputs={}, samples=4)]
    subject = from_module(linear(), given)
    assert [batch.samples for batch in subject.batches] == [1, 2, 3, 4]
    assert len(subject.batches) == 4  # type: ignore[arg-type]


def test_a_data_loader_is_walked_anew_and_a_generator_is_kept() -> None:
    loader = DataLoader(TensorDataset(torch.ones(5, 2)), batch_size=2)

    def produce() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(3):
            yield {"input": torch.ones(1, 2)}

    for inputs, count in ((loader, 3), (produce(), 3)):
        subject = from_module(linear(), inputs)
        assert [len(list(subject.batches)) for _ in range(2)] == [count, count]


def test_inputs_are_copied_in_float32_and_nested_ones_keep_their_shape() -> None:
    half, integer = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.int32)
    nested = {"pair": Pair(half, [integer, {"deep": half.double()}]), "name": "x"}
    (batch,) = batches(nested)
    pair = batch.inputs["pair"]
    assert isinstance(pair, Pair)
    assert (pair.left.dtype, pair.right[0].dtype, pair.right[1]["deep"].dtype) == (
        torch.float32,
        torch.int32,
        torch.float32,
    )
    pair.left.zero_()
    assert half.tolist() == [1.0, 1.0]
    assert batch.inputs["name"] == "x"


def test_inputs_that_need_a_gradient_still_do_and_are_leaves() -> None:
    given = torch.ones(1, 2, requires_grad=True)
    (batch,) = batches((given, given * 2))
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in batch.positional)


def test_tokens_are_those_that_are_not_padding() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.ones(2, 3, dtype=torch.long)
    assert batches({"input_ids": ids, "attention_mask": mask})[0].tokens == 3
    assert batches({"input_ids": ids})[0].tokens == 6
    assert batches({"input": torch.ones(2, 3)})[0].tokens == 0


def test_a_module_that_cannot_be_copied_is_one_line() -> None:
    module = linear()
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"Linear cannot be copied .*file\.py:function") as caught:
        from_module(module, torch.ones(1, 2)).load(None)
    assert "\n" not in str(caught.value)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(UsageError, match="not function"):
        from_module(batches, torch.ones(1))  # type: ignore[arg-type]


def test_a_cache_among_the_inputs_is_copied_for_each_run() -> None:
    mine = DynamicCache()
    mine.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    subject = from_module(linear(), {"input": torch.ones(4, 2), "past_key_values": mine})
    for _ in range(2):  # as a model does that appends to what it is given
        given = next(iter(subject.batches)).inputs["past_key_values"]
        given.update(torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1, 3), 0)
        assert given.get_seq_length() == 3
    assert mine.get_seq_length() == 2
