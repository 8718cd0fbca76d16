"""The pages below docs/ are true: their links, the names and numbers that they explain, the arithmetic they claim."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from overflow_lab import analyze, load, tolerances
from overflow_lab.analysis.results import SEVERITIES, VERDICTS, Effect, Finding, Verdict
from overflow_lab.formats import FORMATS, FloatFormat, integer_limit
from tests.samples import SAMPLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def anchors(page: str) -> set[str]:
    """Return the anchors that a repository's web page gives to headings."""
    titles = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def section(page: str, title: str) -> str:
    return page.split(f"\n{title}\n")[1].split("\n## ")[0]


def first_cells(table: str) -> set[str]:
    """Return the names in code that stand in the first cells of tables."""
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    for file, anchor in links:
        target = DOCS / file if file else page
        assert target.exists(), file
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), f"{file}#{anchor}"


def test_the_verdict_that_the_page_begins_with_is_the_sample_reports() -> None:
    shown = " ".join(read("verdict.md").split("```")[1].split())
    verdict = analyze(load(SAMPLES[0].recording)).verdicts["float16"]
    assert verdict.origin is not None
    assert verdict.value is not None
    assert f"breaks: {verdict.verdict}" in shown
    assert f"{verdict.origin.module} ({verdict.origin.op})" in shown
    assert f"float32 has {verdict.value:,.0f} there" in shown


def test_every_verdict_and_severity_has_a_row() -> None:
    page = read("verdict.md")
    assert first_cells(section(page, "## Verdicts")) == set(VERDICTS)
    assert first_cells(section(page, "## Severity")) == set(SEVERITIES)


def test_every_field_of_a_verdict_and_of_its_output_has_a_row() -> None:
    fields = section(read("verdict.md"), "## The fields")
    told = first_cells(fields.split("### `output`")[0])
    assert told == set(Verdict("float16", "ok", "none", "").to_dict())
    output = fields.split("### `output`")[1].split("### ")[0]
    assert first_cells(output) == set(Effect().to_dict())


def test_every_role_of_a_link_has_a_row() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS.parent / "overflow_lab/analysis").glob("*.py"))
    roles = set(re.findall(r"\bLink\(\s*\"(\w+)\"", code))
    assert roles
    assert roles <= first_cells(section(read("verdict.md"), "## The fields").split("### `chain`")[1].split("### ")[0])


def test_every_field_of_a_finding_is_named() -> None:
    told = section(read("verdict.md"), "## The fields").split("### `findings`")[1]
    fields = Finding("float16", "nan", "other", None, "error", "").to_dict()
    assert {name for name in fields if f"`{name}`" not in told} == set()


def power(exponent: int) -> str:
    return f"2^{exponent}"


def format_row(fmt: FloatFormat) -> str:
    largest = f"{fmt.max:,.0f}" if fmt.max < 1e6 else f"{fmt.max:.4g}"
    small = [power(int(math.log2(x))) for x in (fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps / 2)]
    bits = f"{fmt.exponent_bits} + {fmt.mantissa_bits}"
    return f"| {' | '.join([fmt.name, bits, str(fmt.precision), largest, *small, f'{integer_limit(fmt):,}'])} |"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=list(FORMATS))
def test_the_table_of_formats_is_true(fmt: FloatFormat) -> None:
    assert format_row(fmt) in read("numerics.md").splitlines()


def test_the_tolerances_that_the_page_names_are_those_of_the_code() -> None:
    page = " ".join(section(read("numerics.md"), "## What counts as wrong").split())
    for name in ("bfloat16", "float16"):
        assert f"{round(100 * tolerances.tolerance(FORMATS[name]), 2):g} percent in {name}" in page
    assert f"{tolerances.TOLERATED_ROUNDINGS} $u$" in page
    assert {6: "six"}[tolerances.TOLERATED_NOISE] in page
    assert f"at most {tolerances.MOST_NOISE:.0%}".replace("%", " percent") in page
    assert f"passes {tolerances.SPREAD:.0%}".replace("%", " percent") in page
    assert (tolerances.TIES, tolerances.EVENED) == (0.25, 0.5)


def half(value: float, dtype: torch.dtype = torch.float16) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def test_the_arithmetic_of_the_page_is_what_torch_does() -> None:
    bf16 = torch.bfloat16
    assert (half(65519.0), half(65520.0)) == (65504.0, math.inf)
    assert half(1e-8) == 0.0
    assert (half(1 - 1e-3, bf16), half(257.0, bf16), half(2049.0)) == (1.0, 256.0, 2048.0)
    z = torch.tensor([6.2, 6.3], dtype=bf16).float()
    assert torch.sigmoid(z).to(bf16).tolist() == [half(1 - 2**-8, bf16), 1.0]
    positions = torch.arange(900.0, 1025.0)
    assert (positions.to(bf16).float() - positions).abs().max() == 2.0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_a_running_sum_of_ones_stands_still_where_the_page_says(dtype: torch.dtype, limit: float) -> None:
    total = torch.zeros((), dtype=dtype)
    for _ in range(2100):
        total = total + 1
    assert float(total) == limit


@pytest.mark.parametrize("fmt", [FORMATS["bfloat16"], FORMATS["float16"]], ids=lambda fmt: fmt.name)
def test_one_rounding_leaves_a_bit_more_than_the_format_has(fmt: FloatFormat) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).double()
    error = values.to(getattr(torch, fmt.name)).double() - values
    bits = -math.log2(float(error.norm() / values.norm()))
    assert fmt.precision + 1 < bits < fmt.precision + 2
    assert float((error / values).pow(2).mean()) < (fmt.eps / 2) ** 2 / 3
