"""What torch says when an operation has no kernel for a dtype, or when two dtypes that do not go together meet."""

from __future__ import annotations

_SAYINGS = (
    "not implemented for",
    "not supported for",
    "status_not_supported",  # cuBLAS and cuDNN, of bfloat16 on older GPUs
    "dtypes not supported",
    "either float or double",
    "of float, double",
    "unsupported dtype",
    "unsupported scalartype",
    "same dtype",
    "should be the same",
    "expected scalar type",
    "expected dtype",
    "expected object of scalar type",
    "expected floating",
    "only supports",
    "only support",
    "doesn't support",
    "does not support",
    "without overflow",
)


def is_unsupported(error: BaseException) -> bool:
    """Return whether an exception says that a kernel is missing, or that dtypes or a constant do not fit."""
    text = str(error).lower()
    return isinstance(error, (RuntimeError, NotImplementedError, TypeError, ValueError)) and any(
        t in text for t in _SAYINGS
    )
