"""Where the command line writes: names derived from the input's, and never over a file without being told."""

from __future__ import annotations

import re
from pathlib import Path

from overflow_lab.errors import UsageError

FOLDER = Path("reports")


def stem_of(model: str) -> str:
    """Return a file name for a model: "org/name" gives "org--name", "dir/file.py:build" gives "file-build"."""
    file, colon, function = model.rpartition(":")
    name = f"{Path(file).stem}-{function}" if colon and file.endswith(".py") else model
    path = Path(name)
    name = path.resolve().name if path.is_dir() or path.is_absolute() else name.replace("/", "--")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "scan"


def check_writable(path: Path) -> None:
    """Refuse a place where no file can be written, before a long scan and not after it. Leaves no file behind."""
    new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another place.") from error


def place(given: Path | None, stem: str, suffix: str, *, overwrite: bool) -> Path:
    """Return the path to write: the given one, which must be free, or the first free one of that stem in reports/."""
    if given is not None:
        if given.exists() and not overwrite:
            raise UsageError(f"{given} exists; choose another name, or give --overwrite.")
        return given
    number, path = 1, FOLDER / f"{stem}{suffix}"
    while path.exists() and not overwrite:
        number += 1
        path = FOLDER / f"{stem}-{number}{suffix}"
    return path


def check_folder(folder: Path | None, *, overwrite: bool) -> None:
    """Refuse a folder that holds something already, before a long scan and not after it."""
    if folder is not None and folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists; choose another folder, or give --overwrite.")
