"""Real classes whose residual stream leaves float16: the rescale mends them, and a plain checkpoint carries it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from overflow_lab.remedies import scaling
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.remedies.scaling.rescale import SAME_FUNCTION
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.subjects import Subject
from overflow_lab.subjects.containers import tensors
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.quiet import quiet_loading
from tests import tiny_models
from tests.rescaled import LIMIT, error, output

DECODER = tiny_models.DECODER
OTHERS: dict[str, Callable[[], Any]] = {
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**DECODER)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**DECODER)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)),
    "neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**{k: v for k, v in DECODER.items() if k != "num_key_value_heads"})
    ),
}
NAMES = ["t5", "mt5", "pegasus", "bart", "llama", "gemma3", "phi", "phi3", "gpt2", "neox", "vit", "bert", "mixtral",
         "qwen2", "whisper"]  # fmt: skip
GENERATING = ["t5", "gpt2"]
# What writes into the stream last in a layer.
WRITERS = (
    "down_proj", "down_proj.weight", "fc2.weight", "mlp.c_proj.weight", "output.dense.weight",
    "dense_4h_to_h.weight", "post_feedforward_layernorm.weight", "SelfAttention.o.weight",
)  # fmt: skip
# The stream of Whisper's encoder begins with a GELU, and keeps its values for that.
IN = {"whisper": "decoder"}
# No field of these configs holds the eps of their norms; in these two, no eps may stay as it is either, since the
# embeddings are small beside the stream.
EPS_LEFT, UNSAVABLE = {"bart", "bert"}, {"pegasus", "whisper"}


@dataclass(frozen=True)
class Case:
    """A broken checkpoint, its scan, and the one remedy that was proposed."""

    name: str
    folder: Path
    digest: str
    subject: Subject
    found: Scan
    remedies: tuple[Remedy, ...]

    @property
    def remedy(self) -> Remedy:
        """The one remedy."""
        (only,) = self.remedies
        return only


def build(name: str) -> Any:
    torch.manual_seed(7)
    model = (OTHERS[name]() if name in OTHERS else tiny_models.build(name)).eval()
    with torch.no_grad():
        for name_, parameter in model.named_parameters():
            if parameter.dim() > 1:  # as wide as in a trained model: an eps is small beside it
                parameter.mul_(4.0)
            if any(word in name_ for word in ("embed", "shared", "wte", "wpe")) and 0.0 < parameter.std() < 0.5:
                parameter.div_(2 * parameter.std())
    return model


def overflowing(name: str, model: Any, inputs: dict[str, Any]) -> Any:
    """Double the weights that write into the stream until some module gives four times as much as may be."""
    writers = [p for path, p in model.named_parameters() if path.endswith(WRITERS) and IN.get(name, "") in path]
    assert writers
    for _ in range(40):
        if largest_output(model, inputs) >= 4 * LIMIT:
            return model
        with torch.no_grad():
            for parameter in writers:
                parameter.mul_(2.0)
    raise AssertionError(f"{name} stays within the limit")


def largest_output(model: Any, inputs: dict[str, Any]) -> float:
    """Return the largest magnitude that any module gives; the squares inside norms are none of these."""
    seen = [0.0]

    def look(module: Any, args: Any, made: Any) -> None:
        seen.extend(float(t.abs().max()) for _, t in tensors(made, "output", caches=False) if t.is_floating_point())

    handles = [module.register_forward_hook(look) for module in model.modules()]
    logits(model, inputs)
    for handle in handles:
        handle.remove()
    return max(seen)


def _called(model: Any, inputs: dict[str, Any]) -> torch.nn.Module:
    """Return a module without arguments that calls the model."""

    class Called(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Any:
            return self.model(**inputs)

    return Called()


def first_inputs(subject: Subject, model: Any) -> dict[str, Any]:
    """Return the first inputs of a subject, with something for a decoder to read."""
    inputs = dict(next(iter(subject.batches)).inputs)
    if model.config.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = torch.tensor([[0, 5, 9, 4]]).expand(len(next(iter(inputs.values()))), -1)
    return inputs


def half(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.half() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return output(_called(model, inputs))


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name: str = request.param
    folder = tmp_path_factory.mktemp(name) / name
    options = SubjectOptions(generate=name in GENERATING, max_new_tokens=4, num_beams=2, batch_size=12)
    with quiet_loading():
        model = build(name)
        model.save_pretrained(folder)
        overflowing(name, model, first_inputs(find(str(folder), options), model)).save_pretrained(folder)
        before = digest(folder)
        subject = find(str(folder), options)
        found = scan_subject(subject, ["float16"], level="operation")
        yield Case(name, folder, before, subject, found, scaling.propose(subject, found, "float16").remedies)


def test_the_checkpoint_breaks_and_one_rescale_is_proposed(case: Case) -> None:
    assert case.found.verdicts["float16"].verdict in ("overflow", "nan")
    assert case.remedy.kind == "rescale"
    assert case.remedy.precision == case.remedy.runs_in == "float16"
    assert case.remedy.members


def test_the_mended_subject_scans_ok(case: Case) -> None:
    again = scan_subject(case.remedy.mend(case.subject), ["float16"], level="operation")
    verdict = again.verdicts["float16"]
    assert (verdict.verdict, verdict.severity) == ("ok", "none"), verdict.reason


def test_float32_is_the_same_bits_or_off_by_what_the_remedy_says(case: Case) -> None:
    plain, rescaled = case.subject.load(None), case.remedy.mend(case.subject).load(None)
    inputs = first_inputs(case.subject, plain)
    right, got = logits(plain, inputs), logits(rescaled, inputs)
    if "the same bits" in case.remedy.notes[0]:
        assert torch.equal(right, got)
    else:
        assert case.name in EPS_LEFT
        assert error(right, got) < SAME_FUNCTION


def test_plain_transformers_loads_what_was_saved_and_gives_the_mended_models_outputs(
    case: Case, tmp_path: Path
) -> None:
    folder = tmp_path / "mended"
    if case.name in UNSAVABLE:
        assert case.remedy.save is None
        assert case.remedy.notes[-1].endswith("Paste the code.")
        return
    assert case.remedy.save is not None
    case.remedy.save(folder)
    mended = case.remedy.mend(case.subject).load(torch.float16)
    loaded = type(mended).from_pretrained(folder, dtype=torch.float16).eval()  # type: ignore[attr-defined]
    inputs = first_inputs(case.subject, mended)
    right = logits(case.subject.load(None), inputs)
    got = logits(loaded, half(inputs))
    assert torch.equal(got, logits(mended, half(inputs)))
    assert error(right, got.float()) < 0.02


def test_the_code_to_paste_does_what_the_remedy_does(case: Case) -> None:
    ((_, code),) = case.remedy.snippets.items()
    pasted, mended = case.subject.load(None), case.remedy.mend(case.subject).load(None)
    exec(code, {"model": pasted})
    assert all(map(torch.equal, pasted.state_dict().values(), mended.state_dict().values()))
    inputs = first_inputs(case.subject, pasted)
    assert torch.equal(logits(pasted, inputs), logits(mended, inputs))


def test_the_users_folder_is_as_it_was(case: Case) -> None:
    assert digest(case.folder) == case.digest


def test_what_was_saved_gives_float32s_answers_in_float16(case: Case, tmp_path: Path) -> None:
    if case.subject.generation is None:
        assert case.name not in GENERATING
        return
    assert case.remedy.save is not None
    case.remedy.save(tmp_path / "mended")
    plain: Any = case.subject.load(None)
    loaded = type(plain).from_pretrained(tmp_path / "mended", dtype=torch.float16).eval()
    assert sorted(case.subject.generation.strategies) == ["beam", "greedy"]
    for settings in case.subject.generation.strategies.values():
        for batch in itertools.islice(case.subject.batches, 1):
            right = plain.generate(**batch.inputs, **settings)
            assert loaded.generate(**batch.inputs, **settings).tolist() == right.tolist()
