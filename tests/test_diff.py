"""`overflow-lab diff`: exit codes, one line for each error, and one comparison as text, JSON, Markdown and a page."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from rich.console import Console

from overflow_lab import compare
from overflow_lab.analysis.comparison import Comparison
from overflow_lab.cli.app import run
from overflow_lab.recording import CastRow, ModuleRow, RangeRow, Recording
from overflow_lab.recording.codec import encode
from overflow_lab.report import diff, diff_html, diff_markdown, diff_plots, diff_terminal
from tests.conftest import OpenPage
from tests.sample_recording import CULPRIT, HOSTILE, sample_recording, t5_modules, wide_modules
from tests.test_report_html import Outline


def fixed() -> Recording:
    """Return the sample with a renamed block, no large value, and another torch."""
    modules = [
        (path.replace("DenseReluDense", "mlp"), kind, leaf, min(a, 12.0)) for path, kind, leaf, a in t5_modules()
    ]
    made = sample_recording(modules=modules)
    header = dataclasses.replace(made.header, environment={**made.header.environment, "torch": "2.14.0"})
    return dataclasses.replace(made, header=header, rows=tuple(r for r in made.rows if not isinstance(r, CastRow)))


def hostile() -> Recording:
    """Return a recording whose modules, model and versions are named to break out of what shows them."""
    made = sample_recording()
    name = f"{HOSTILE}|`*_@team #1\n\x1b[31m[link](http://x)"
    rows = [
        dataclasses.replace(row, path=row.path and f"{row.path}.{name}") if isinstance(row, ModuleRow) else row
        for row in made.rows
    ]
    rows = [
        dataclasses.replace(row, module=row.module and f"{row.module}.{name}") if isinstance(row, RangeRow) else row
        for row in rows
    ]
    header = dataclasses.replace(made.header, subject={"name": name}, environment={name: name})
    return dataclasses.replace(made, rows=tuple(rows), header=header, path=f"/tmp/{HOSTILE.replace('/', '')}.jsonl")


@pytest.fixture(scope="module")
def better() -> Comparison:
    return compare(sample_recording(), fixed())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("recordings")
    for name, made in (("old", sample_recording()), ("new", fixed())):
        lines = [encode(row) for row in (made.header, *made.rows, made.footer)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / "old.jsonl"), str(folder / "new.jsonl")


def shown(comparison: Comparison, *, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(diff_terminal.render(comparison))
    return console.export_text()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["old", "new"], 0),
        (["old", "new", "--fail-on", "worse"], 0),
        (["new", "old", "--fail-on", "worse"], 1),
        (["new", "old", "--fail-on", "verdict"], 0),
        (["old", "-p", "bf16", "-p", "fp16", "--fail-on", "verdict"], 1),
        (["old", "-p", "bf16", "fp16", "--fail-on", "verdict"], 1),
        (["old", "old", "--fail-on", "worse"], 0),
        (["old", "new", "-p", "bf16"], 0),
        (["old"], 2),
        (["old", "-p", "fp16"], 2),
        (["old", "missing"], 2),
        (["old", "new", "-p", "float64"], 2),
        (["old", "new", "--fail-on", "error"], 2),
        (["old", "new", "--json", "--markdown"], 2),
        (["old", "new", "--html", "old"], 2),
    ],
)
def test_the_exit_code_says_whether_something_got_worse(
    files: tuple[str, str], arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"old": files[0], "new": files[1]}
    assert run(["diff", *(paths.get(a, a) for a in arguments)]) == code
    told = capsys.readouterr()
    assert (told.err.count("\n"), bool(told.out)) == ((1, False) if code == 2 else (0, True))


def test_json_is_one_object_and_nothing_else(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", *files, "--json"]) == 0
    told = capsys.readouterr().out
    assert json.loads(told) == json.loads(json.dumps(compare(*files).to_dict()))
    assert json.loads(told)["after"]["label"] == "new.jsonl"


def test_quiet_prints_the_verdicts_alone(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run(["diff", *files, "-q"])
    told = capsys.readouterr().out
    assert "float16" in told
    assert CULPRIT.replace("DenseReluDense", "mlp") not in told


def test_the_terminal_names_what_changed(better: Comparison) -> None:
    told = shown(better)
    assert "breaks: overflow → breaks: precision lost" in told
    assert "NaN or inf went" in told
    assert "encoder.block.*.layer.*.DenseReluDense → encoder.block.*.layer.*.mlp" in told
    assert "environment.torch: 2.13.0 → 2.14.0" in told
    assert "72 sites better; 158 sites the same." in told


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_terminal_keeps_to_its_width(better: Comparison, width: int) -> None:
    assert max(len(line) for line in shown(better, width=width).splitlines()) <= width


def test_equal_recordings_are_said_to_be_equal() -> None:
    same = compare(sample_recording(), sample_recording())
    assert "Nothing changed at 230 sites." in shown(same)
    assert "Nothing changed at 230 sites" in diff_markdown.render(same)
    assert "No site changed." in diff_html.render(same)


def test_worse_sites_come_first_and_a_cap_says_what_it_left_out(better: Comparison) -> None:
    lines = diff.sites(compare(fixed(), sample_recording()), cap=5)
    assert [line.judged for line in lines] == ["worse"] * 5
    assert lines[0].why == "NaN or inf came"
    assert lines[0].renamed_from == CULPRIT.replace("DenseReluDense", "mlp")


def test_markdown_fits_an_issue_whatever_the_names() -> None:
    long = sample_recording(modules=[(f"{path}.{'x' * 300}", *rest) for path, *rest in wide_modules(2000)])  # type: ignore[misc]
    for made in (compare(long, fixed()), compare(hostile(), fixed()), compare(sample_recording(), hostile())):
        assert len(diff_markdown.render(made)) < 60_000


def test_markdown_keeps_hostile_names_in_code() -> None:
    told = diff_markdown.render(compare(sample_recording(), hostile()))
    outside = re.sub(r"(`+).+?\1", "", told)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)|@team|\x1b", outside)
    rows = [line for line in told.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {4, 8}


def test_the_page_is_closed_and_deaf_to_hostile_names() -> None:
    page = diff_html.render(compare(sample_recording(), hostile()))
    outline = Outline(page)
    assert outline.balanced
    assert outline.count("script") == outline.count("img") == 0
    policy = next(attrs["content"] for tag, attrs in outline.tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "script-src" not in policy
    assert "http://" not in "".join(
        str(v) for _, attrs in outline.tags for k, v in attrs.items() if k in ("href", "src")
    )


def test_absolute_paths_are_not_told_on_page_or_in_markdown(better: Comparison) -> None:
    assert "/home/somebody" not in diff_html.render(better)
    assert "/home/somebody" not in diff_markdown.render(better)


def test_equal_comparisons_give_equal_pages_of_a_bounded_size(better: Comparison) -> None:
    assert diff_html.render(better) == diff_html.render(compare(sample_recording(), fixed()))
    names = wide_modules(3000)
    before = sample_recording(modules=names)
    after = sample_recording(modules=[(path, kind, leaf, size + 6) for path, kind, leaf, size in names])
    page = diff_html.render(compare(before, after))
    assert len(page.encode()) < 500_000
    assert "Showing 200 of" in page


def test_the_picture_shows_the_sites_that_changed_most_in_order(better: Comparison) -> None:
    sites = diff_plots.shown(better, limit=10)
    assert set(map(id, sites)) == set(map(id, better.changed[:10]))
    assert [s.order for s in sites] == sorted(s.order for s in sites)
    assert len(diff_plots.dumbbells(better).axes) == 2


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_sideways_scrolling(
    browser_page: OpenPage, tmp_path: Path, better: Comparison, width: int, scheme: str
) -> None:
    path = diff_html.write(better, tmp_path / "made" / "diff.html")
    with browser_page(path, width=width, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("h1").inner_text().replace("\u200b", "").count("→") == 1
        assert page.locator("table.changes tbody tr").count() == 72
        found = Axe().run(page).response["violations"]
        assert [(v["id"], [node["html"][:120] for node in v["nodes"][:3]]) for v in found] == []


def test_a_hostile_page_runs_nothing_in_a_browser(browser_page: OpenPage, tmp_path: Path) -> None:
    path = diff_html.write(compare(hostile(), sample_recording()), tmp_path / "diff.html")
    with browser_page(path) as page:
        assert page.locator("img, script").count() == 0
