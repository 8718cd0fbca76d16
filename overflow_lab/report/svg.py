"""A matplotlib Figure as inline SVG for a page: deterministic, small, coloured by the page's CSS variables."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from overflow_lab.report.plots import PALETTE

_NUMBER = re.compile(r"-?\d+\.\d+")
# Older matplotlibs write the short form, newer ones two properties.
_FONT = re.compile(r"font: ([\d.]+px)[^;]*")
_FAMILY = re.compile(r"font-family: [^;]*; ?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
# matplotlib's settings are global: two threads that change and restore them at once would leave them changed.
_ONE_AT_A_TIME = threading.Lock()
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def inline(figure: Figure, name: str, *, label: str, titles: Sequence[str] = ()) -> str:
    """Return `figure` as an `<svg>` element for HTML, with `label` for those who do not see it.

    `titles` are shown on hovering the columns of the figure's first axes, one for each column from the left. `name`
    tells the ids of several pictures on one page apart. Equal figures give equal text.
    """
    root = ET.fromstring(_draw(figure, name))
    _strip_namespaces(root)
    _drop(root, ("metadata", "style"))
    _rename_ids(root, name)
    for element in root.iter():
        _tidy(element)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    _add_columns(root, figure, titles)
    return _coloured(ET.tostring(root, encoding="unicode", short_empty_elements=True))


def _draw(figure: Figure, name: str) -> str:
    """Return matplotlib's own SVG; its settings hold inside this call only."""
    buffer = io.StringIO()
    settings = {"svg.hashsalt": name, "svg.fonttype": "none"}
    with _ONE_AT_A_TIME, rc_context(settings):  # type: ignore[arg-type]
        FigureCanvasSVG(figure).print_svg(buffer, metadata=_NO_METADATA)
    return buffer.getvalue()


def _strip_namespaces(root: ET.Element) -> None:
    """HTML knows SVG without prefixes: drop them from tags and attributes."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}


def _drop(root: ET.Element, tags: Sequence[str]) -> None:
    """Remove elements that act beyond the picture: a style element in inline SVG styles the whole page."""
    for parent in list(root.iter()):
        for child in [c for c in parent if c.tag in tags or (c.tag == "defs" and all(g.tag in tags for g in c))]:
            parent.remove(child)


def _rename_ids(root: ET.Element, name: str) -> None:
    """Keep only the ids that something refers to, numbered and prefixed with the picture's name."""
    used: dict[str, str] = {}
    for element in root.iter():
        for value in element.attrib.values():
            for target in [*_REFERENCE.findall(value), *([value[1:]] if value.startswith("#") else [])]:
                used.setdefault(target, f"{name}-{len(used)}")
    for element in root.iter():
        if (old := element.attrib.pop("id", None)) in used:
            element.attrib["id"] = used[str(old)]
        for key, value in element.attrib.items():
            if value.startswith("#") and value[1:] in used:
                element.attrib[key] = f"#{used[value[1:]]}"
            else:
                element.attrib[key] = _REFERENCE.sub(lambda m: f"url(#{used[m[1]]})", value)


def _tidy(element: ET.Element) -> None:
    """Shorten numbers to a tenth of a point, leave the font to the page, drop white space."""
    for key, value in element.attrib.items():
        if key in ("d", "x", "y", "width", "height", "transform", "viewBox"):
            element.attrib[key] = " ".join(
                _NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value).split()
            )
        elif key == "style":
            element.attrib[key] = (
                _FAMILY.sub("", _FONT.sub(r"font-size: \1", value)).replace(": ", ":").replace("; ", ";")
            )
    if element.tag not in ("text", "tspan", "title") and not (element.text or "").strip():
        element.text = None
    if not (element.tail or "").strip():
        element.tail = None


def _add_columns(root: ET.Element, figure: Figure, titles: Sequence[str]) -> None:
    """Lay a transparent rectangle with a title over each column of the first axes."""
    if not titles or not figure.axes:
        return
    width, height = (float(size) * 72 for size in figure.get_size_inches())
    box = figure.axes[0].get_position()
    step = box.width * width / len(titles)
    group = ET.SubElement(root, "g", {"class": "hits"})
    for number, title in enumerate(titles):
        place: Mapping[str, float] = {
            "x": box.x0 * width + number * step,
            "y": (1 - box.y1) * height,
            "width": step,
            "height": box.height * height,
        }
        rectangle = ET.SubElement(group, "rect", {key: f"{value:.1f}" for key, value in place.items()})
        ET.SubElement(rectangle, "title").text = title


def _coloured(svg: str) -> str:
    """Replace the palette's colours by the page's variables, so that the picture follows light and dark."""
    for name, colour in PALETTE.items():
        svg = svg.replace(colour, f"var(--plot-{name})")
    return svg
