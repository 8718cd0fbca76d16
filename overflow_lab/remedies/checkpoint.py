"""Saving a mended model as a checkpoint folder: whole or not at all, and never over what is the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from overflow_lab.subjects import Subject


def save_checkpoint(model: nn.Module, folder: Path, source: Subject) -> None:
    """Write `model` to `folder` as `save_pretrained` does, with the tokenizer and processor of the subject `source`.

    Weights are written in the dtypes that the model has them in. The folder appears when all of it is written. Raises
    UsageError where it exists and holds something, or where the subject is no checkpoint.
    """
    check_savable(source)
    with new_folder(folder) as made:
        assert source.save is not None
        source.save(model, made)


def check_savable(source: Subject) -> None:
    """Raise UsageError where the models of a subject cannot be saved as a checkpoint."""
    if source.save is None:
        raise UsageError(
            f"{source.name} is no checkpoint of transformers, so there is none to save; give a folder that "
            "save_pretrained wrote, or a hub id."
        )


def check_free(folder: Path, *, overwrite: bool = False) -> None:
    """Raise UsageError where a checkpoint cannot be written to `folder`: it holds something, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a folder to save in.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise UsageError(f"{folder} exists; choose another folder, or give --overwrite.")


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which takes its name when the block ends well and is removed otherwise.

    What is there is replaced with `overwrite` only, and by then the new one is whole.
    """
    check_free(folder, overwrite=overwrite)
    target = folder.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        made.chmod(0o777 & ~_umask())  # mkdtemp's folder is for its owner alone
        yield made
        if target.is_dir():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(made, target)
            shutil.rmtree(old)
        else:
            os.replace(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _umask() -> int:
    """Return the process's umask, which can be read only by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
