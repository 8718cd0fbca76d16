"""The shadow beside each tensor: the value that it would have, had everything before it been computed in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

_WIDE = {torch.float64: torch.float64, torch.complex64: torch.complex64, torch.complex128: torch.complex128}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the shadow of a floating or complex dtype: float32, and as wide as the tensor where that is wider."""
    return _WIDE.get(dtype, torch.complex64 if dtype.is_complex else torch.float32)


def has_shadow(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a kind that gets a shadow."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return floating and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized


@dataclass
class Memory:
    """What is known of one storage of the program: its shadow, element for element, and the marks of its values."""

    dtype: torch.dtype
    flat: torch.Tensor
    weak: Any
    error: float = 0.0
    marks: dict[str, set[int]] = field(default_factory=dict)


class Shadows:
    """Maps the storages of a running program to flat shadows of the same number of elements.

    A tensor's shadow is the view of that flat shadow with the tensor's own sizes, strides and offset; so views, in-place
    operations and aliasing hold by themselves. A tensor that was never seen is given its own value as shadow.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Memory] = {}
        self._until_prune = 256

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a tensor, a view onto the memory's shadow."""
        plain = tensor.resolve_neg() if tensor.is_neg() else tensor
        if tensor.is_conj() or plain is not tensor:
            return self._lazy(tensor)
        memory = self.memory(tensor)
        if memory.dtype != tensor.dtype:
            return self._reinterpreted(memory, tensor)
        return memory.flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def memory(self, tensor: torch.Tensor) -> Memory:
        """Return what is known of a tensor's storage, beginning with its own value."""
        found = self._memory.get(_key(tensor))
        return self._new(tensor, None) if found is None else found

    def known(self, tensor: torch.Tensor) -> Memory | None:
        """Return what is known of a tensor's storage, None where nothing is."""
        return self._memory.get(_key(tensor))

    def give(self, tensor: torch.Tensor, value: torch.Tensor) -> Memory:
        """Let `value` (same shape) be the shadow of a tensor with a storage of its own."""
        found = self.known(tensor)
        if found is not None and found.dtype == tensor.dtype:
            view = found.flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            view.copy_(value)
            return found
        return self._new(tensor, value)

    def sync(self, tensor: torch.Tensor) -> Memory:
        """Let a tensor's own value be its shadow."""
        return self.give(tensor, tensor.detach())

    def _new(self, tensor: torch.Tensor, value: torch.Tensor | None) -> Memory:
        self._prune()
        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        flat = self._adopted(tensor, value, elements)
        if flat is None:
            own = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (elements,), (1,))  # type: ignore[call-overload]
            flat = own.to(wide(tensor.dtype), copy=True)
            if value is not None:
                flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(value)
        memory = Memory(tensor.dtype, flat, storage._weak_ref())
        self._memory[_key(tensor)] = memory
        return memory

    def _adopted(self, tensor: torch.Tensor, value: torch.Tensor | None, elements: int) -> torch.Tensor | None:
        """Return a value that is laid out as the whole storage is, as the flat shadow itself: no copy."""
        if value is None or value.dtype != wide(tensor.dtype) or tensor.storage_offset() or value.storage_offset():
            return None
        dense = tensor.numel() == elements and value.untyped_storage().nbytes() == elements * value.element_size()
        if not dense or tensor.stride() != value.stride() or value.data_ptr() == tensor.data_ptr():
            return None
        return value.as_strided((elements,), (1,), 0)

    def _reinterpreted(self, memory: Memory, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a complex tensor seen as real or the other way round; of other bits, the value itself."""
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        if _REAL.get(memory.dtype) == tensor.dtype:
            return torch.view_as_real(memory.flat).reshape(-1).as_strided(size, stride, offset)
        if _REAL.get(tensor.dtype) == memory.dtype:
            return torch.view_as_complex(memory.flat.reshape(-1, 2)).as_strided(size, stride, offset)
        return tensor.detach().to(wide(tensor.dtype), copy=True)

    def _lazy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the shadow of a tensor with a pending conjugation or sign: that of its memory, with the same pending."""
        base = tensor.conj() if tensor.is_conj() else tensor
        if base.is_neg():
            return tensor.detach().resolve_neg().resolve_conj().to(wide(tensor.dtype), copy=True)
        return self.of(base).conj() if tensor.is_conj() else self.of(base)

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


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
