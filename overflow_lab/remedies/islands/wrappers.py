"""The texts of the wrappers that are pasted: islands in plain torch, without overflow-lab."""

from __future__ import annotations


def filled(text: str, **values: str) -> str:
    """Return one of the texts with what stands in angle brackets filled in."""
    for name, value in values.items():
        text = text.replace(f"<{name}>", value)
    return text


_CROSSED = '''
def crossed(value, change):
    """Return nested arguments or outputs with `change` applied to each tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [crossed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):  # an output class of transformers, too
        items = {name: crossed(item, change) for name, item in value.items()}
        return items if type(value) is dict else type(value)(**items)
    return value  # a cache of keys and values stays the caller's own: the model writes into it
'''

MODULES = (
    """import copy
import functools

import torch

ISLANDS = <names>
OPEN = <open>  # those of them whose output stays in float32

"""
    + _CROSSED
    + '''

def bordered(forward, low, device):
    """Return a forward that runs in float32: inputs widened, autocast off, outputs cast back to `low`."""

    def widened(tensor):
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    def narrowed(tensor):
        return tensor.to(low) if low is not None and tensor.dtype == torch.float32 else tensor

    @functools.wraps(forward)
    def run(*args, **kwargs):
        with torch.autocast(device, enabled=False):
            args, kwargs = crossed((args, kwargs), widened)
            output = forward(*args, **kwargs)
        return crossed(output, narrowed)

    return run


def keep_in_float32(model, original, low=<low>, names=ISLANDS):
    """Let these modules of `model` run in float32, on the weights of `original`, the same model in float32.

    `low` is the dtype that the rest of the model runs in; None under autocast, where weights are float32 anyway.
    """
    for name in names:
        parent, _, last = name.rpartition(".")
        island = copy.deepcopy(original.get_submodule(name))
        setattr(model.get_submodule(parent), last, island)
        device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        island.forward = bordered(island.forward, None if name in OPEN else low, device)
    return model


# original = ...from_pretrained(..., dtype=torch.float32); model = ...from_pretrained(..., dtype=<low>)
# keep_in_float32(model, original)
'''
)

OPERATIONS = (
    """import functools

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

LOW = <low>
# module (a dotted path, "" is the model itself): the operations of its own code that run in float32
OPERATIONS = <operations>
# these move values and make none: what is wide stays wide
MOVES = <moves>

"""
    + _CROSSED
    + '''

def cast(tensor, dtype):
    return torch.ops.aten._to_copy.default(tensor, dtype=dtype)


def deciding(args, kwargs):
    """Return the floating operands whose dtypes decide that of the result."""
    floats = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    most = any(tensor.ndim for tensor in floats)
    return [tensor for tensor in floats if bool(tensor.ndim) == most]


def up(value):
    def one(item):
        if isinstance(item, torch.Tensor):
            return cast(item, torch.float32) if item.dtype == LOW else item
        return torch.float32 if item is LOW else item

    return tree_map(one, value)


class Wide(TorchDispatchMode):
    """Does the chosen operations in float32, and keeps their results so until another operation is given them.

    `held` maps float32 tensors that stand for half-precision ones to whether the program asked for float32 of them.
    """

    def __init__(self):
        super().__init__()
        self.path, self.aside, self.held = [], False, WeakTensorKeyDictionary()

    def is_held(self, item):
        return isinstance(item, torch.Tensor) and item in self.held

    def hold(self, result, asked=False):
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.held[tensor] = asked
        return result

    def narrow(self, value):
        return tree_map(lambda item: cast(item, LOW) if self.is_held(item) else item, value)

    def exact(self, tensor):
        self.aside = True
        try:
            return self.hold(cast(tensor, torch.float32), asked=True)
        finally:
            self.aside = False

    def gives_low(self, name, args, kwargs):
        asked = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.dtype)]
        if asked or (name.endswith("softmax") and len(args) > 2 and args[2]):
            return bool(asked) and asked[0] is LOW
        found = deciding(args, kwargs)
        return bool(found) and all(t.dtype == LOW or (self.is_held(t) and not self.held[t]) for t in found)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.aside:
            return op(*args, **kwargs)
        name = f"{op.namespace}.{op._schema.name.rpartition('::')[2]}"
        leaves = tree_leaves((args, kwargs))
        held = [item for item in leaves if self.is_held(item)]
        asked = bool(held) and all(self.held[item] for item in held)
        places = [i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        written = [args[i] for i in places if i < len(args)]
        bits = any(isinstance(item, torch.dtype) for item in leaves)
        if any(self.is_held(item) for item in written):
            args, kwargs = up((args, kwargs))
            return op(*args, **kwargs)
        if held and not written and (op.is_view and not bits or name in MOVES):
            args, kwargs = up((args, kwargs))
            return self.hold(op(*args, **kwargs), asked)
        if op.is_view or written or name not in OPERATIONS.get(self.path[-1] if self.path else "", ()):
            if asked and not written and all(t.dtype == torch.float32 for t in deciding(args, kwargs)):
                return self.hold(op(*args, **kwargs), asked=True)
            return op(*self.narrow(args), **self.narrow(kwargs)) if held else op(*args, **kwargs)
        low = self.gives_low(name, args, kwargs)
        args, kwargs = up((args, kwargs))
        if name in ("aten._softmax", "aten._log_softmax"):
            args = (*args[:2], False)
        result = op(*args, **kwargs)
        return self.hold(result, not low) if low or any(self.held[item] for item in held) else result


class Upcasts(TorchFunctionMode):
    """To torch a wide tensor is float32 already: `.float()` of it would be no operation, and nothing would be asked."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, mode = kwargs or {}, self.mode
        asks = function is torch.Tensor.float or any(i is torch.float32 for i in (*args[1:], *kwargs.values()))
        if asks and not mode.aside and args and mode.is_held(args[0]) and not mode.held[args[0]]:
            args = (mode.exact(args[0]), *args[1:])
        return function(*args, **kwargs)


def counted(forward, mode, path):
    """Return a forward that says where the program is; the outermost one enters the mode."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        alone = not mode.path
        mode.path.append(path)
        try:
            if alone:
                with Upcasts(mode), mode:
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
        finally:
            mode.path.pop()
        return crossed(output, mode.narrow) if alone and path else output

    return run


def wide_operations(model):
    """Let the chosen operations of a half-precision model run in float32. It shows what to change in the code."""
    mode = Wide()
    for path, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            module.forward = counted(module.forward, mode, path)
    return model


# wide_operations(model)
'''
)
