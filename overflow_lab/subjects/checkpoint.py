"""A checkpoint in a folder or on the hub: where it is, its config, its weights, and what to say of broken ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from overflow_lab.errors import UsageError, one_line
from overflow_lab.subjects.offload import is_offloaded, keep_while, loading_options, scratch_folder
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.quiet import quiet_loading
from overflow_lab.subjects.tasks import Choice

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm",
    "vocab.json", "vocab.txt", "tekken.json",
)  # fmt: skip
# These need no vocabulary file: their tokens are bytes or characters.
BYTE_TOKENIZERS = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is: `place` is a folder's path or a hub id, `typed` what the user wrote, for messages."""

    place: str
    typed: str
    local: bool
    options: SubjectOptions

    @property
    def where(self) -> dict[str, Any]:
        """The arguments that every `from_pretrained` and `cached_file` takes; a folder never touches the network."""
        options = self.options
        named = {"revision": None if self.local else options.revision, "subfolder": options.subfolder}
        return {**{key: value for key, value in named.items() if value}, "local_files_only": self.local}

    def file(self, *names: str) -> str | None:
        """Return the local path of the first of these files that is there, downloaded if need be; None without any."""
        from transformers.utils import cached_file

        lenient = {
            "_raise_exceptions_for_missing_entries": False,
            "_raise_exceptions_for_connection_errors": False,
        }
        for name in names:
            with blamed_on(self, name):
                found = cached_file(self.place, name, **lenient, **self.where)
            if found is not None:
                return str(found)
        return None

    def has_tokenizer(self) -> bool:
        """Say whether files of a tokenizer are there; without them transformers makes one up that knows no word."""
        if self.file(*TOKENIZER_FILES):
            return True
        path = self.file("tokenizer_config.json")
        return path is not None and any(name in Path(path).read_text("utf-8", "replace") for name in BYTE_TOKENIZERS)

    def complaint(self, error: BaseException) -> str:
        """Return `error` on one line with the place written as the user wrote it."""
        return one_line(error, limit=1000).replace(self.place, self.typed)[:300]


@contextmanager
def blamed_on(source: Source, what: str) -> Iterator[None]:
    """Run quietly; turn whatever the loader raises about `what` into a UsageError of one line."""
    with quiet_loading():
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(_explained(source, what, error)) from error


def _explained(source: Source, what: str, error: BaseException) -> str:
    kinds = {type(each).__name__ for each in _chain(error)}
    if "SafetensorError" in kinds:
        return (
            f"the weights of {source.typed!r} are damaged ({source.complaint(error)}); copy or download the file again "
            "and compare its size"
        )
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds or "can't allocate memory" in str(error):
        return f"{source.typed!r} does not fit into memory in float32; use a machine or device with more"
    hub = _hub_complaint(source, kinds)
    if hub:
        return hub
    if "trust_remote_code" in str(error):
        return _needs_code(source)
    # An extra of transformers (sentencepiece, timm, ...): its own message says what to install.
    return f"{what} of {source.typed!r} cannot be loaded: {source.complaint(error)}; mend it, or choose another model"


def _needs_code(source: Source) -> str:
    return f"{source.typed!r} needs code that comes with it; read that code, then add --trust-remote-code"


def _hub_complaint(source: Source, kinds: set[str]) -> str | None:
    name = source.typed
    if "GatedRepoError" in kinds:
        return f"{name!r} is gated; ask for access on its page, then `hf auth login`"
    if "RevisionNotFoundError" in kinds:
        return f"{name!r} has no revision {source.options.revision!r}; give a branch, tag or commit of it"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{name!r} is no folder here and no model on the hub; check the name, or `hf auth login` for private ones"
        )
    if kinds & {"HFValidationError"}:
        return f"{name!r} is no folder here and no possible name on the hub; check the name"
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError", "ConnectTimeout"}:
        return (
            f"{name!r} is no folder here, not in the local cache, and the hub cannot be reached (no network, or "
            "HF_HUB_OFFLINE is set); check the name and the connection"
        )
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def read_config(source: Source) -> tuple[Any, Mapping[str, Any], str]:
    """Return the transformers config, the raw config.json and its local path.

    UsageError when there is none, it is no JSON object, its model_type is unknown, or code of its own is needed.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.utils import cached_file

    with blamed_on(source, "the config"):
        # With errors this time: here a wrong name, no network and a gated model are told apart.
        path = cached_file(source.place, "config.json", **source.where)
    if path is None:
        inside = f" in {source.options.subfolder!r}" if source.options.subfolder else ""
        raise UsageError(f"{source.typed!r} has no config.json{inside}; give a folder that save_pretrained wrote")
    raw = _json_object(source, path)
    model_type, remote = str(raw.get("model_type") or ""), "AutoConfig" in auto_map_of(raw)
    if model_type not in CONFIG_MAPPING and remote and not source.options.trust_remote_code:
        raise UsageError(_needs_code(source))
    if model_type not in CONFIG_MAPPING and not remote:
        raise UsageError(_unknown_type(source, model_type))
    with blamed_on(source, "the config"):
        trust = source.options.trust_remote_code
        config = AutoConfig.from_pretrained(source.place, trust_remote_code=trust, **source.where)
    return config, raw, path


def auto_map_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the classes of a checkpoint's own code by Auto class; empty when it has none, or something else there."""
    auto_map = raw.get("auto_map")
    return auto_map if isinstance(auto_map, dict) else {}


def _json_object(source: Source, path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except (OSError, ValueError) as error:
        reason = source.complaint(error)
        raise UsageError(f"the config.json of {source.typed!r} is not readable ({reason}); write it again") from error
    if not isinstance(raw, dict):
        kind = type(raw).__name__
        raise UsageError(f"the config.json of {source.typed!r} holds a {kind}, not an object; write it again")
    return raw


def _unknown_type(source: Source, model_type: str) -> str:
    import transformers

    if not model_type:
        return f"the config.json of {source.typed!r} names no model_type; add it (bert, llama, t5, ...)"
    version = transformers.__version__
    return f"{source.typed!r} is of model_type {model_type!r}, which transformers {version} does not know; upgrade it"


def check_weights(source: Source, raw: Mapping[str, Any]) -> None:
    """Raise UsageError when there are no weights, or only pickles and these were not allowed."""
    if raw.get("transformers_weights") or source.file(*SAFE):
        return
    pickled = any(_exists(source, name) for name in PICKLES)
    if pickled and source.options.allow_pickle:
        return
    if pickled:
        raise UsageError(
            f"{source.typed!r} has its weights only as a pickle, which may run code when loaded; convert it to "
            "safetensors, or add --allow-pickle if you trust it"
        )
    raise UsageError(f"{source.typed!r} has no {SAFE[0]}; save the weights there with save_pretrained")


def _exists(source: Source, name: str) -> bool:
    """Say whether a file is there, without downloading it."""
    from transformers.utils import has_file

    where = {key: value for key, value in source.where.items() if key != "subfolder"}
    subfolder = source.options.subfolder
    try:
        with quiet_loading():
            return bool(has_file(source.place, f"{subfolder}/{name}" if subfolder else name, **where))
    except Exception:
        return False


class Checkpoint:
    """Loads the model of a source in any dtype; callable as `Subject.load`.

    The first load in float32 happens when the subject is made, to find what is missing; its model is handed out to the
    first `load(None)`. Weights that the checkpoint lacks are drawn once: later loads get the same numbers.
    """

    def __init__(self, source: Source, choice: Choice, config: Any, device: torch.device) -> None:
        self.source, self.choice, self.config, self.device = source, choice, config, device
        self.notes: tuple[str, ...] = ()
        self._drawn: dict[str, torch.Tensor] = {}
        self._waiting: torch.nn.Module | None = None

    def first(self) -> torch.nn.Module:
        """Load in float32, check what was loaded, and keep the model for the first `load(None)`."""
        model, info = self._load(torch.float32)
        self._check(model, info)
        weights = model.state_dict()
        self._drawn = {name: weights[name].clone() for name in sorted(info["missing_keys"]) if name in weights}
        self._waiting = model
        return model

    def __call__(self, dtype: torch.dtype | None) -> torch.nn.Module:
        """Return the model on the device, in evaluation mode, in float32 (None) or cast to `dtype` by the loader."""
        model, self._waiting = (self._waiting, None) if dtype is None else (None, self._waiting)
        if model is None:
            model, _ = self._load(dtype or torch.float32)
            weights = model.state_dict()
            with torch.no_grad():
                for name, values in self._drawn.items():
                    weights[name].copy_(values)
        return model if is_offloaded(model) else model.to(self.device)

    def _load(self, dtype: torch.dtype) -> tuple[torch.nn.Module, dict[str, Any]]:
        options = self.source.options
        more: dict[str, Any] = {"trust_remote_code": options.trust_remote_code} if self.choice.auto else {}
        if options.attn_implementation is not None:
            more["attn_implementation"] = options.attn_implementation
        spread = loading_options(options.device_map, options.max_memory, self.device)
        scratch = scratch_folder() if spread else None
        if scratch is not None:
            more |= {**spread, "offload_folder": scratch.name}
        with blamed_on(self.source, "the model"):
            model, info = self.choice.loader.from_pretrained(
                self.source.place,
                config=self.config,
                dtype=dtype,
                use_safetensors=None if options.allow_pickle else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **more,
                **self.source.where,
            )
        if scratch is not None:
            keep_while(model, scratch)
        return model, info

    def _check(self, model: torch.nn.Module, info: Mapping[str, Any]) -> None:
        typed = self.source.typed
        # A weight says more than its bias, so the largest number of axes comes first.
        wrong = sorted(info["mismatched_keys"], key=lambda entry: (-len(entry[1]), entry[0]))
        if wrong:
            name, found, needed = wrong[0]
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise UsageError(
                f"the weights of {typed!r} do not fit its config: {name} is {tuple(found)}, the config asks for "
                f"{tuple(needed)}{more}; use the config.json that was saved with the weights"
            )
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        total = sum(1 for _ in model.named_parameters())
        if missing and len(missing) >= total:
            raise UsageError(
                f"none of the weights in {typed!r} belongs to {type(model).__name__}; check architectures in its "
                "config.json"
            )
        self.notes = tuple(
            f"{len(names)} {'weight' if len(names) == 1 else 'weights'} {what}: {_first_of(names)}"
            for names, what in (
                (missing, "not in the checkpoint, drawn at random (answers and outputs mean nothing)"),
                (unexpected, "of the checkpoint not used by this class"),
            )
            if names
        )


def _first_of(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (", ..." if len(names) > count else "")
