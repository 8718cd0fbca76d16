"""What is asked of a model: a plain forward, or an answer by `generate`, on uncast inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overflow_lab.capture.precisions import Prepared


@dataclass(frozen=True)
class Call:
    """One call of a model; `settings` are those of `generate`, None for a plain forward, and `run` its name."""

    inputs: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    settings: Mapping[str, Any] | None = None
    run: str = "forward"

    def named(self) -> dict[str, Any]:
        """Return all inputs by name, positional ones as "#0", "#1"."""
        return {**dict(self.inputs), **{f"#{i}": value for i, value in enumerate(self.positional)}}

    def cast(self, prepared: Prepared) -> Call:
        """Return the call with its inputs cast as a precision's are, all of them copies."""
        inputs, positional = prepared.inputs(dict(self.inputs)), prepared.inputs(tuple(self.positional))
        return Call(inputs, positional, self.settings, self.run)

    def make(self, model: Any) -> Any:
        """Make the call of a model."""
        if self.settings is None:
            return model(*self.positional, **self.inputs)
        return model.generate(**self.inputs, **self.settings)
