"""Find what the user means by MODEL: the demo, a Python file, a folder or a name on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from overflow_lab.errors import UsageError
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.subject import Subject

__all__ = ["SubjectOptions", "find"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
WAYS = "give a hub id (google-t5/t5-small), a save_pretrained folder, path/to/file.py:function, or demo"


def find(model: str, options: SubjectOptions | None = None) -> Subject:
    """Return the subject that `model` names.

    `demo` is the built-in model (write `./demo` for a folder of that name); `FILE.py:function` a function that returns
    `(module, inputs)`; an existing folder is loaded as `save_pretrained` wrote it, and never touches the network; any
    other name is a hub id. Raises UsageError, in one line, when there is no such thing or it cannot be loaded.
    """
    options = options or SubjectOptions()
    _check(options)
    # Each kind is imported when it is asked for: transformers takes seconds.
    if not model:
        raise UsageError(f"the name of the model is empty; {WAYS}")
    if model == "demo":
        return _demo(options)
    from overflow_lab.subjects.python_file import from_python_file, is_python_file

    if is_python_file(model) and not Path(model).is_dir():
        return from_python_file(model, options)
    from overflow_lab.subjects.huggingface import from_folder, from_hub

    if Path(model).expanduser().is_dir():
        return from_folder(Path(model).expanduser(), options)
    if Path(model).expanduser().exists():
        raise UsageError(f"{model!r} is a file; {WAYS}")
    if not HUB_ID.fullmatch(model):
        raise UsageError(f"there is no folder {model!r}; {WAYS}")
    return from_hub(model, options)


def _check(options: SubjectOptions) -> None:
    counts = {
        "batch-size": options.batch_size,
        "num-beams": options.num_beams,
        "max-new-tokens": options.max_new_tokens,
        "max-length": options.max_length,
    }
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name} is {value}; give 1 or more")
    if options.texts is not None and options.inputs_file is not None:
        raise UsageError("both --text and --inputs were given; choose one of them")
    if (options.column or options.template) and options.inputs_file is None:
        raise UsageError("--column and --template are about a file; name it by --inputs")
    if options.texts is not None and not any(text.strip() for text in options.texts):
        raise UsageError("--text is empty; give at least one text, or leave it out for the built-in ones")


def _demo(options: SubjectOptions) -> Subject:
    from overflow_lab.subjects import demo
    from overflow_lab.subjects.huggingface import from_folder

    return from_folder(demo.folder(), options, name="demo", kind="demo", texts=demo.PROMPTS or None)
