"""Pages of HTML for people: each is one file that refers to nothing outside itself. `page.html` has their macros."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class PageTable(NamedTuple):
    """A table of a page."""

    caption: str
    heads: list[tuple[str, bool]]  #: Of each column, its head and whether it has numbers.
    rows: Sequence[Sequence[object]]
    bad: int = 0  #: How many of the first rows are marked as wrong.


class BarPart(NamedTuple):
    """One part of a stacked bar."""

    kind: str
    label: str
    amount: float
    text: str
    shade: float = 1.0  #: Its opacity, 0 to 1.


class BarChart(NamedTuple):
    """A stacked bar, with a second bar below it if `below` is given; both start at zero, on the same scale."""

    title: str
    parts: Sequence[BarPart]
    #: The amount that is as wide as the picture, unless the amount of `below` is larger.
    total: float
    below: BarPart | None = None


class Curve(NamedTuple):
    """A curve of a `LineChart`."""

    kind: str
    label: str
    points: list[tuple[float, float]]  #: Along the axes, each from 0 to 1.


class LineChart(NamedTuple):
    """Curves over two common axes."""

    title: str
    curves: list[Curve]
    #: Marks of the vertical axis: the height, from 0 to 1, and the text.
    ticks: list[tuple[float, str]]
    #: The texts at the left and the right end of the horizontal axis.
    ends: tuple[str, str]


def table(caption: str, heads: str, rows: Sequence[Sequence[object]], bad: int = 0) -> PageTable:
    """Returns a table. Its heads are divided by `|`, and end in `#` for columns of numbers: `"module|error#"`."""
    return PageTable(caption, [(head.rstrip("#"), head.endswith("#")) for head in heads.split("|")], rows, bad)


def rendered(template: Path, **values: Any) -> str:
    """Returns the text of a Jinja template with these values. A template of HTML imports the macros of pages by
    `{% import "page.html" as draw %}`.
    """
    import jinja2

    loader = jinja2.FileSystemLoader([template.parent, Path(__file__).parent])
    autoescape = template.suffix == ".html"
    environment = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,  # a name that no value has is an error, not an empty text
        autoescape=autoescape,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template.name).render(**values)
