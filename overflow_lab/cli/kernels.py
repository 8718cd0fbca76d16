"""`overflow-lab kernels MODEL`: what this torch on this device lacks for a model in one precision."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.ending import named_end
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import check_fail_on

if TYPE_CHECKING:
    from overflow_lab.kernels import Kernels


def kernels(
    context: typer.Context,
    model: opt.Model,
    precision: opt.OnePrecision = "bfloat16",
    text: opt.Text = None,
    task: opt.Task = None,
    device: opt.Device = "cpu",
    attn_implementation: opt.AttnImplementation = None,
    revision: opt.Revision = None,
    subfolder: opt.Subfolder = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    allow_pickle: opt.AllowPickle = False,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    quiet: opt.Quiet = False,
) -> int:
    """List the operations of MODEL that this torch cannot do in a precision on a device, one on each line."""
    check_fail_on(fail_on)
    found = _found(model, precision, context.params, quiet)
    if as_json:
        sys.stdout.write(json.dumps(_object(model, device, found), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(lines(found, device)) + "\n")
    return int(bool(found.missing) and fail_on != "never")


def _found(model: str, precision: str, params: dict[str, Any], quiet: bool) -> Kernels:
    """Run the model behind progress bars."""
    with named_end(), watched(quiet=quiet) as bars:
        from overflow_lab.kernels import kernels as run

        return run(model, precision=precision, progress=bars, **opt.subject_options(params))


def lines(found: Kernels, device: str) -> list[str]:
    """Return what to print: a line for each missing kernel, or that there is none."""
    from overflow_lab.report import text

    ran = f"{text.plural(found.operations, 'operation')} ran in {found.dtype} on {device}"
    if not found.missing:
        return [f"nothing is missing: {ran}"]
    made = []
    for one in found.missing:
        line = f"  ({text.visible(one.source, 200)})" if one.source else ""
        where = f"{text.module_name(one.module)}  {text.visible(one.op or 'unknown operation', 80)}"
        made.append(f"{where}  {text.visible(one.dtype, 20)}  {text.without_paths(one.message, 300)}{line}")
    return [*made, f"missing: {len(found.missing):,}; {ran}"]


def _object(model: str, device: str, found: Kernels) -> dict[str, Any]:
    """Return the one object that --json prints."""
    from overflow_lab import __version__

    return {
        "overflow_lab": __version__,
        "schema": 1,
        "model": model,
        "device": device,
        **dataclasses.asdict(found),
    }
