"""The stack of running modules: true while they run, recurse, raise and are reached by other names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from overflow_lab.capture.module_path import ModulePath
from tests.modules import Calling, Nested, Step, chain

X = torch.ones(2, 4)


class Log:
    """Writes down what a ModulePath tells."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[str] = []
        self.path = ModulePath(model, self._enter, self._leave)

    def _enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.events.append(f"+{path}")

    def _leave(self, path: str, output: Any) -> None:
        self.events.append(f"-{path}")


def hooks(model: nn.Module) -> int:
    """How many hooks and marks of hooks stand in a model's dicts."""
    return sum(
        len(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if "hook" in name and isinstance(value, dict)
    )


def test_nothing_is_touched_before_it_is_entered_and_nothing_is_left_behind() -> None:
    model = chain(torch.relu, torch.tanh)
    log = Log(model)
    assert hooks(model) == 0
    with log.path:
        assert hooks(model) > 0
    assert hooks(model) == 0


def test_modules_are_entered_and_left_in_order() -> None:
    log = Log(model := chain(torch.relu, torch.tanh))
    with log.path:
        model(X)
    assert log.events == ["+", "+0", "-0", "+1", "-1", "-"]
    assert log.path.called == {"", "0", "1"}
    assert log.path.failed_at is None


def test_a_module_that_calls_itself_is_on_the_stack_more_than_once() -> None:
    stacks: list[list[str]] = []
    model = Nested()
    path = ModulePath(model, lambda *_: stacks.append(list(path.stack)), lambda *_: None)
    with path:
        model(X, depth=1)
    assert stacks == [[""], ["", "lin"], ["", ""], ["", "", "lin"]]
    assert path.stack == []


def test_a_module_is_known_by_its_first_name_whatever_name_it_is_called_by() -> None:
    model = Calling(lambda m, x: m.other(x))
    model.other = model.lin
    log = Log(model)
    with log.path:
        model(X)
    assert log.events == ["+", "+lin", "-lin", "-"]


def test_entering_twice_is_an_error() -> None:
    path = ModulePath(chain(torch.relu), lambda *_: None, lambda *_: None)
    with path, pytest.raises(RuntimeError, match="entered already"):
        path.__enter__()


def test_a_module_that_returns_none_is_left_without_an_output() -> None:
    log = Log(model := chain(lambda x: None))
    with log.path:
        model(X)
        assert log.path.stack == []
    assert log.events == ["+", "+0"]
    assert log.path.failed_at is None


def fail(_: Any) -> Any:
    raise ValueError("on purpose")


def test_hooks_are_gone_and_the_innermost_module_is_named_after_the_model_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 4), chain(torch.relu, fail))
    log = Log(model)
    with pytest.raises(ValueError, match="on purpose"), log.path:
        model(X)
    assert log.path.failed_at == "1.1"
    assert hooks(model) == 0


def test_an_exception_that_the_model_handles_is_not_blamed_for_a_later_one() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        try:
            m.first(x)
        except ValueError:
            x = m.lin(x)
        return m.second(x)

    model = Calling(forward)
    model.first, model.second = Step(fail), Step(fail)
    log = Log(model)
    with pytest.raises(ValueError, match="on purpose"), log.path:
        model(X)
    assert log.path.failed_at == "second"


def test_an_exception_raised_from_another_is_blamed_on_the_module_of_the_first() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        try:
            return m.inner(x)
        except ValueError as error:
            raise RuntimeError("wrapped") from error

    model = Calling(forward)
    model.inner = Step(fail)
    log = Log(model)
    with pytest.raises(RuntimeError, match="wrapped"), log.path:
        model(X)
    assert log.path.failed_at == "inner"


def test_an_exception_of_a_fallback_is_blamed_on_the_fallback() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        try:
            return m.fast(x)
        except ValueError:
            return m.slow(m.lin(x))

    model = Calling(forward)
    model.fast, model.slow = Step(fail), Step(fail)
    log = Log(model)
    with pytest.raises(ValueError, match="on purpose"), log.path:
        model(X)
    assert log.path.failed_at == "slow"


def test_an_exception_that_is_being_handled_around_the_run_is_not_the_models() -> None:
    model = Calling(lambda m, x: (m.silent(x), m.loud(x)))
    model.silent, model.loud = Step(lambda x: None), Step(fail)
    log = Log(model)
    try:
        raise KeyError("before")
    except KeyError:
        with pytest.raises(ValueError, match="on purpose"), log.path:
            model(X)
    assert log.path.failed_at == "loud"


def test_the_stack_is_true_when_a_hook_of_the_users_raises() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        try:
            m.guarded(x)
        except ValueError:
            seen.append(list(log.path.stack))
        return m.lin(x)

    seen: list[list[str]] = []
    model = Calling(forward)
    model.guarded = Step(torch.relu)
    model.guarded.register_forward_pre_hook(lambda module, args: fail(args))
    log = Log(model)
    with log.path:
        model(X)
    assert seen == [[""]]
    assert log.events == ["+", "+lin", "-lin", "-"]


def interrupt(_: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_that_a_model_swallows_leaves_no_name_on_the_stack() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            m.slow(x)
        return m.lin(x)

    model = Calling(forward)
    model.slow = Step(interrupt)
    log = Log(model)
    with log.path:
        model(X)
    assert log.events == ["+", "+slow", "+lin", "-lin", "-"]
    assert log.path.stack == []


def test_a_scripted_module_is_refused_by_name() -> None:
    model = nn.Sequential(nn.ReLU(), torch.jit.script(nn.Linear(4, 4)))
    log = Log(model)
    with log.path:
        model(X)
    assert log.path.refused == ["1"]
    assert log.events == ["+", "+0", "-0", "-"]


def test_an_output_of_one_element_in_a_tuple_stays_a_tuple() -> None:
    model = chain(lambda x: (x,))
    with Log(model).path:
        assert type(model(X)) is tuple
