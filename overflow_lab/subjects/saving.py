"""Saving a model of a checkpoint as a folder that transformers loads: with the tokenizer, processor and texts of its
source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from overflow_lab.subjects.checkpoint import Source, blamed_on
from overflow_lab.subjects.quiet import quiet_loading

# A tokenizer, a processor and a chat template are these, and so is whatever a class of its own reads. Copied as they
# are: a tokenizer that is loaded and saved again is not always the same.
_COMPANIONS = (".json", ".txt", ".model", ".spm", ".jinja", ".tiktoken", ".bpe", ".codes", ".vocab")
_TEMPLATES = "additional_chat_templates"
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
# Written by `save_pretrained`, or about another run than this.
_OWN = ("config.json", "adapter_config.json", "trainer_state.json")
# The further parts of a sentence-transformers model (1_Pooling, 2_Dense), which its modules.json names.
_PARTS = "[0-9]*_*/*"
_INDEX, _GENERATION = ".index.json", "generation_config.json"


def save_model(source: Source, model: torch.nn.Module, folder: Path) -> None:
    """Write `model`, of the class and config of `source`, and its tokenizer, processor and licence into `folder`.

    Weights are written in the dtypes that the model has them in, as safetensors; `dtype` in config.json is the one
    that most of them have. The generation config is the source's, byte for byte.
    """
    files = list(companions(source, code=bool(getattr(_config(model), "auto_map", None))))
    _forget_gguf(model)
    with quiet_loading():
        _save_pretrained(model, folder, own_generation=any(path.name == _GENERATION for _, path in files))
    _write_dtype(folder / "config.json", main_dtype(model))
    for name, path in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)


def main_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the floating dtype that most of a model's parameters have: a few may be kept in another."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def companions(source: Source, *, code: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield (name in the new folder, file) of what belongs to a checkpoint beside its weights and config.

    `code` asks for Python files too, which a checkpoint of classes of its own needs. Of a hub id the small files are
    downloaded if need be; offline, those in the cache are taken.
    """
    folder = Path(source.place) if source.local else _snapshot(source, code)
    if source.options.subfolder:
        folder = folder / source.options.subfolder
    own = [path for path in folder.glob("*") if _belongs(path, code)]
    for path in sorted([*own, *folder.glob(f"{_TEMPLATES}/*.jinja"), *folder.glob(_PARTS)]):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _belongs(path: Path, code: bool) -> bool:
    if path.name in _OWN or path.name.endswith(_INDEX):
        return False
    legal = path.stem.upper().startswith(_LEGAL)
    return legal or path.suffix in _COMPANIONS or (code and path.suffix == ".py")


def _snapshot(source: Source, code: bool) -> Path:
    """Return the folder of a hub id's files in the local cache, the small ones among them downloaded."""
    from huggingface_hub import snapshot_download

    below = f"{source.options.subfolder}/" if source.options.subfolder else ""
    wanted = [*(f"*{suffix}" for suffix in _COMPANIONS), *(f"{name}*" for name in _LEGAL), _PARTS]
    wanted += ["*.py"] if code else []
    with blamed_on(source, "the tokenizer"):
        patterns = [below + pattern for pattern in wanted]
        return Path(snapshot_download(source.place, revision=source.options.revision, allow_patterns=patterns))


def _save_pretrained(model: Any, folder: Path, *, own_generation: bool) -> None:
    """Call `save_pretrained`; the generation config is left out where the source's own file is copied.

    `save_pretrained` refuses to write one that `from_pretrained` accepts (a temperature without sampling, say).
    """
    kept = getattr(model, "generation_config", None)
    try:
        if own_generation and kept is not None:
            model.generation_config = type(kept)()
        model.save_pretrained(folder)
    finally:
        if kept is not None:
            model.generation_config = kept


def _forget_gguf(model: Any) -> None:
    """Take the mark of a GGUF file off a model whose weights are plain numbers again, which it keeps otherwise."""
    config = _config(model)
    marks = getattr(config, "quantization_config", None)
    method = marks.get("quant_method") if isinstance(marks, dict) else getattr(marks, "quant_method", None)
    if str(getattr(method, "value", method)) == "gguf":
        del config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False


def _config(model: torch.nn.Module) -> Any:
    return getattr(model, "config", None)


def _write_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the model into its config: `save_pretrained` takes that of the first parameter."""
    raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
    name = str(dtype).removeprefix("torch.")
    if _renamed(raw, name):
        path.write_text(json.dumps(raw, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")


def _renamed(raw: dict[str, Any], name: str) -> bool:
    """Set every `dtype` of a config and of the configs inside it; return whether one was another."""
    changed = bool(raw.get("dtype", name) != name)
    if changed:
        raw["dtype"] = name
    for value in raw.values():
        if isinstance(value, dict):
            changed = _renamed(value, name) or changed
    return changed
