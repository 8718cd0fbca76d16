"""The options that commands share or that would drown a signature: each with its help, named once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

PRECISIONS = tuple(name + way for way in ("", "-to", "-autocast") for name in ("float16", "bfloat16"))
JUDGED = (*PRECISIONS, "float32", "forecast")
FAIL_ON = ("never", "warning", "error")


def among(*names: str) -> Callable[[str], list[str]]:
    """Return what completes an option's value in a shell: those of `names` that begin as typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def subject_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a command's parameters that Python's functions take, under the names that they have there."""
    from overflow_lab.subjects.options import SubjectOptions

    known = {field.name for field in dataclasses.fields(SubjectOptions)} | {"level", "store_texts"}
    given: dict[str, Any] = {"texts": tuple(params["text"]) if params.get("text") else None}
    if params.get("inputs") is not None:
        given["inputs_file"] = str(params["inputs"])
    return {name: value for name, value in params.items() if name in known} | given


Model = Annotated[
    str,
    typer.Argument(help="A hub id, a save_pretrained folder, path/to/file.py:function, or demo.", show_default=False),
]
Precisions = Annotated[
    list[str] | None,
    typer.Option(
        "--precision",
        "--dtype",
        "-p",
        help="float16 or bfloat16, plain or with -to or -autocast; repeats; or forecast [default: both plain].",
        show_default=False,
        autocompletion=among(*JUDGED),
    ),
]
OnePrecision = Annotated[
    str,
    typer.Option(
        "--precision",
        "--dtype",
        "-p",
        help="float16 or bfloat16, plain or with -to or -autocast.",
        autocompletion=among(*PRECISIONS),
    ),
]
Text = Annotated[
    list[str] | None, typer.Option(help="An input text; repeats [default: built-in texts].", show_default=False)
]
Inputs = Annotated[Path | None, typer.Option(help="A file of inputs: txt, jsonl, csv or parquet.", show_default=False)]
Column = Annotated[str | None, typer.Option(help="The column of the file to take.", show_default=False)]
Template = Annotated[
    str | None, typer.Option(help="Joins columns of the file: '{question} {context}'.", show_default=False)
]
Task = Annotated[str | None, typer.Option(help="Overrules the task that the config names.", show_default=False)]
BatchSize = Annotated[int, typer.Option(help="Inputs in a batch.")]
MaxLength = Annotated[int | None, typer.Option(help="Cut inputs at this many tokens.", show_default=False)]
Generate = Annotated[bool, typer.Option(help="Let generative models answer, by greedy and by beam search.")]
NumBeams = Annotated[int, typer.Option(help="Beams of the beam search.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate.")]
Device = Annotated[
    str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.", autocompletion=among("cpu", "cuda", "mps"))
]
AttnImplementation = Annotated[
    str | None,
    typer.Option(
        help="eager, sdpa, ...; as transformers names it.",
        show_default=False,
        autocompletion=among("eager", "sdpa", "flash_attention_2", "flex_attention"),
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="auto",
        help="auto: weights that do not fit stay on disk, and are read when their module is called (accelerate).",
        show_default=False,
        autocompletion=among("auto"),
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With --device-map: weights to keep in memory, as 8GB [default: 40% of what is free].",
        show_default=False,
    ),
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit on the hub.", show_default=False)]
Subfolder = Annotated[
    str | None, typer.Option(help="The folder of the model inside its repository.", show_default=False)
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors (can run code).")
]
RecordingFile = Annotated[
    Path | None,
    typer.Option("--recording", help="The recording to write [default: reports/MODEL.jsonl.gz].", show_default=False),
]
ReportFile = Annotated[
    Path | None,
    typer.Option("--report", help="The report to write [default: reports/MODEL.html].", show_default=False),
]
Level = Annotated[
    str,
    typer.Option(
        help="operation names operations by a shadow run, module does not; auto looks at the size.",
        autocompletion=among("auto", "operation", "module"),
    ),
]
Kernels = Annotated[
    str,
    typer.Option(
        help="How float16's products are done on a CPU: native, emulated (in float32, rounded once), or auto.",
        autocompletion=among("auto", "native", "emulated"),
    ),
]
StoreTexts = Annotated[bool, typer.Option("--store-texts", help="Keep prompts and answers in recording and report.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the verdicts as one JSON object instead of text.")]
FailOn = Annotated[
    str,
    typer.Option(
        help="Exit with 1 at a verdict of this severity or worse: never, warning or error.",
        autocompletion=among(*FAIL_ON),
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files of those names.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; print the verdicts alone.")]
RecordingArgument = Annotated[
    Path, typer.Argument(help="A recording that scan wrote (.jsonl or .jsonl.gz).", show_default=False)
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The HTML file to write [default: beside the recording].", show_default=False),
]
