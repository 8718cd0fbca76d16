"""A matplotlib Figure as inline SVG for a page: deterministic, small, coloured by the page's CSS variables."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from overflow_lab.report.packed import packed
from overflow_lab.report.plots import PALETTE

_NUMBER = re.compile(r"-?\d+\.\d+")
# Older matplotlibs write the short form, newer ones two properties.
_FONT = re.compile(r"font: ([\d.]+px)[^;]*")
_FAMILY = re.compile(r"font-family: [^;]*; ?")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
# matplotlib's settings are global: two threads that change and restore them at once would leave them changed.
_ONE_AT_A_TIME = threading.Lock()
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Panel:
    """The columns of one of a figure's axes, from the left: a title for each, and the key of its row in the tables."""

    titles: Sequence[str]
    keys: Sequence[str] = ()
    axes: int = 0


def inline(
    figure: Figure,
    name: str,
    *,
    label: str,
    title: str = "",
    titles: Sequence[str] = (),
    panels: Sequence[Panel] = (),
) -> str:
    """Return `figure` as an `<svg>` element for HTML, with `title` and `label` for those who do not see it.

    The titles of `panels` (`titles` are those of the first axes) are shown by the page's script at a column. `name`
    tells the ids of several pictures on one page apart. Equal figures give equal text.
    """
    root = ET.fromstring(_draw(figure, name))
    _strip_namespaces(root)
    _drop(root, ("metadata", "style"))
    _rename_ids(root, name)
    for element in root.iter():
        _tidy(element)
        _share_style(element)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", **_described(root, name, title, label)}
    for panel in panels or (Panel(titles),):
        _add_columns(root, figure, panel)
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
        if key == "d" and (short := short_path(value)) != value:
            element.attrib[key] = short
        elif key in ("d", "x", "y", "width", "height", "transform", "viewBox"):
            element.attrib[key] = " ".join(
                _NUMBER.sub(lambda m: f"{float(m[0]):.1f}".removesuffix(".0"), value).split()
            )
        elif key == "style":
            element.attrib[key] = (
                _FAMILY.sub("", _FONT.sub(r"font-size: \1", value)).replace(": ", ":").replace("; ", ";")
            )
    if element.tag not in ("text", "tspan", "title", "desc") and not (element.text or "").strip():
        element.text = None
    if not (element.tail or "").strip():
        element.tail = None


def _share_style(element: ET.Element) -> None:
    """Give the style of many equal markers to their group: crosses and dots come by the hundred."""
    styles = {child.attrib.get("style", "") for child in element if child.tag == "use"}
    if len(styles) == 1 and all(child.tag in ("use", "defs") for child in element) and "style" not in element.attrib:
        element.attrib["style"] = styles.pop()
        for child in element:
            child.attrib.pop("style", None)


def short_path(path: str) -> str:
    """Return the data of a path of straight lines, rounded to a tenth, with relative and one-axis steps; others as is.

    The steps lie between rounded points, so that no error adds up.
    """
    tokens = path.split()
    if len(tokens) % 3 or any(tokens[i] not in ("M", "L") for i in range(0, len(tokens), 3)):
        return path
    made: list[str] = []
    x = y = 0
    for command, *place in zip(*[iter(tokens)] * 3, strict=True):
        to_x, to_y = (round(10 * float(value)) for value in place)
        dx, dy, (x, y) = to_x - x, to_y - y, (to_x, to_y)
        if command == "M":
            made.append(f"m{_tenths(dx)}{_joined(dy)}")
        elif dx and dy:
            made.append(f"l{_tenths(dx)}{_joined(dy)}")
        elif dx or dy:
            made.append(f"h{_tenths(dx)}" if dx else f"v{_tenths(dy)}")
        else:
            made.append("h0")
    return "".join(made)


def _tenths(value: int) -> str:
    """Return an integer number of tenths as SVG writes it: 12.3, .4, -7."""
    whole, part = divmod(abs(value), 10)
    digits = f"{whole}.{part}" if whole and part else f".{part}" if part else str(whole)
    return f"-{digits}" if value < 0 else digits


def _joined(value: int) -> str:
    """Return a number that follows another: a minus parts them, too."""
    return _tenths(value) if value < 0 else f" {_tenths(value)}"


def _described(root: ET.Element, name: str, title: str, label: str) -> dict[str, str]:
    """Put a title and a description first, and return the attributes that point at them; without a title the label."""
    if not title:
        return {"aria-label": label}
    for number, (tag, said) in enumerate((("title", title), ("desc", label))):
        element = ET.Element(tag, {"id": f"{name}-{tag}"})
        element.text = said
        root.insert(number, element)
    return {"aria-labelledby": f"{name}-title", "aria-describedby": f"{name}-desc"}


def _add_columns(root: ET.Element, figure: Figure, panel: Panel) -> None:
    """Add a group that says where the columns of a panel's axes are, and holds their titles and keys packed.

    The page's script lays a transparent rectangle over each: hundreds of them would be half of the page.
    """
    if not panel.titles or panel.axes >= len(figure.axes):
        return
    width, height = (float(size) * 72 for size in figure.get_size_inches())
    box = figure.axes[panel.axes].get_position()
    place = (box.x0 * width, (1 - box.y1) * height, box.width * width, box.height * height)
    data, _ = packed([[title, *panel.keys[n : n + 1]] for n, title in enumerate(panel.titles)])
    facts = {"class": "hits", "data-box": " ".join(f"{value:.1f}" for value in place), "data-columns": data}
    ET.SubElement(root, "g", facts)


def _coloured(svg: str) -> str:
    """Replace the palette's colours by the page's variables, so that the picture follows light and dark."""
    for name, colour in PALETTE.items():
        svg = svg.replace(colour, f"var(--plot-{name})")
    return svg
