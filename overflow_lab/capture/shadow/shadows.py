"""The shadow beside each tensor: the value that it would have, had everything before it been computed in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def wide(dtype: torch.dtype, least: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype of the shadow of a floating or complex dtype: at least `least`, and as wide as the tensor."""
    if dtype.is_complex:
        least = torch.complex128 if least == torch.float64 else torch.complex64
    return dtype if dtype.itemsize >= least.itemsize else least


def has_shadow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind that gets a shadow."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_meta or tensor.is_quantized or tensor.is_nested) and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds its own elements: a class with operations of its own may hold anything."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def why_not(tensor: torch.Tensor) -> str:
    """Return of what kind a tensor is that has no shadow."""
    if not _is_plain(tensor):
        return type(tensor).__name__
    kinds = (("quantized", tensor.is_quantized), ("nested", tensor.is_nested), ("meta", tensor.is_meta))
    return next((kind for kind, holds in kinds if holds), str(tensor.layout).removeprefix("torch."))


@dataclass
class Memory:
    """What is known of one storage: its shadow, element for element, the site that `made` it, marks of its values.

    `rounded` holds, where whole numbers were made otherwise than the shadow's, the site and by what margin.
    """

    dtype: torch.dtype
    flat: torch.Tensor
    weak: Any
    error: float = 0.0
    made: Any = None
    rounded: tuple[Any, torch.Tensor] | None = None
    marks: dict[str, set[int]] = field(default_factory=dict)


class Shadows:
    """Maps the storages of a running program to flat shadows of the same number of elements.

    A tensor's shadow is the view of that flat shadow with the tensor's own sizes, strides and offset; so views,
    in-place operations and aliasing hold by themselves. A tensor that was never seen is given its own value as shadow.
    `least` is the narrowest dtype of a shadow.
    """

    def __init__(self, least: torch.dtype = torch.float32) -> None:
        self.least = least
        self._memory: dict[int, Memory] = {}
        self._until_prune = 256

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the shadow of a floating or complex dtype."""
        return wide(dtype, self.least)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a tensor, a view onto the memory's shadow."""
        if tensor.is_conj() or tensor.is_neg():
            return self._lazy(tensor)
        memory = self.memory(tensor)
        if memory.dtype != tensor.dtype:
            return self._reinterpreted(memory, tensor)
        return memory.flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return what is known of a tensor's storage, beginning with its own value."""
        found = self._memory.get(_key(tensor))
        if found is None:
            return self._new(tensor, None)
        elements = tensor.untyped_storage().nbytes() // found.dtype.itemsize
        if elements != found.flat.numel():
            self._resized(found, tensor, elements)
        return found

    def known(self, tensor: torch.Tensor) -> Memory | None:
        """Return what is known of a tensor's storage, None where nothing is."""
        return self._memory.get(_key(tensor))

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> Memory:
        """Let `value` (same shape) be the shadow of a tensor with a storage of its own."""
        if self.known(tensor) is None:
            return self._new(tensor, value)
        memory = self.memory(tensor)
        view = self.of(tensor)
        if _same_storage(view, memory.flat):
            view.copy_(value)
            return memory
        return self._new(tensor, value)

    def sync(self, tensor: torch.Tensor) -> Memory:
        """Let a tensor's own value be its shadow."""
        if self.known(tensor) is None:
            return self._new(tensor, None)
        if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.size(), strict=True)):
            self.refresh(tensor)  # elements that share their memory cannot be written one by one
            return self.memory(tensor)
        return self.give(tensor, tensor.detach())

    def refresh(self, tensor: torch.Tensor) -> None:
        """Let the shadow of a whole storage, where there is one, be the program's own values."""
        memory = self.known(tensor)
        if memory is not None:
            memory.flat = self._own(tensor, memory.dtype)
            memory.marks.clear()

    def _own(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return all elements of a tensor's storage, widened."""
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=dtype, device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        return flat.to(self.wide(dtype), copy=True)

    def _resized(self, memory: Memory, tensor: torch.Tensor, elements: int) -> None:
        """Follow a storage that has grown or shrunk: the replay may have resized the shadow already."""
        old = memory.flat
        if old.untyped_storage().nbytes() >= elements * old.element_size():
            memory.flat = old.as_strided((elements,), (1,), 0)
            return
        memory.flat = self._own(tensor, memory.dtype)
        memory.flat[: old.numel()] = old

    def _new(self, tensor: torch.Tensor, value: torch.Tensor | None) -> Memory:
        self._prune()
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        flat = self._adopted(tensor, value, elements)
        if flat is None:
            flat = self._own(tensor, tensor.dtype)
            if value is not None:
                flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        before = self._memory.pop(_key(tensor), None)
        if before is not None:
            torch.UntypedStorage._free_weak_ref(before.weak)
        memory = Memory(tensor.dtype, flat, storage._weak_ref())
        self._memory[_key(tensor)] = memory
        return memory

    def _adopted(self, tensor: torch.Tensor, value: torch.Tensor | None, elements: int) -> torch.Tensor | None:
        """Return a value that is laid out as the whole storage is, as the flat shadow itself: no copy."""
        if value is None or value.dtype != self.wide(tensor.dtype) or tensor.storage_offset() or value.storage_offset():
            return None
        dense = tensor.numel() == elements and value.untyped_storage().nbytes() == elements * value.element_size()
        if not dense or tensor.stride() != value.stride() or value.data_ptr() == tensor.data_ptr():
            return None
        return value.as_strided((elements,), (1,), 0)

    def _reinterpreted(self, memory: Memory, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a complex tensor seen as real, or the other way round; of other bits, the value."""
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        if _REAL.get(memory.dtype) == tensor.dtype:
            return torch.view_as_real(memory.flat).reshape(-1).as_strided(size, stride, offset)
        if _REAL.get(tensor.dtype) == memory.dtype:
            return torch.view_as_complex(memory.flat.reshape(-1, 2)).as_strided(size, stride, offset)
        return tensor.detach().to(self.wide(tensor.dtype), copy=True)

    def _lazy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a tensor with a pending conjugation or sign: with the same pending."""
        if tensor.is_neg():
            return torch._neg_view(self.of(torch._neg_view(tensor)))
        return self.of(tensor.conj()).conj()

    def _prune(self) -> None:
        """Forget storages that the program has freed."""
        self._until_prune -= 1
        if self._until_prune > 0:
            return
        dead = [key for key, memory in self._memory.items() if torch.UntypedStorage._expired(memory.weak)]
        for key in dead:
            torch.UntypedStorage._free_weak_ref(self._memory.pop(key).weak)
        self._until_prune = 32 + len(self._memory) // 4

    def close(self) -> None:
        """Let go of all shadows and of the storages' weak references."""
        while self._memory:
            torch.UntypedStorage._free_weak_ref(self._memory.popitem()[1].weak)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _key(a) == _key(b)


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
