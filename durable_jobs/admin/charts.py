"""Bar charts as SVG: the places of the bars, worked out here; the template draws them.

A chart says in words what it shows, each bar has its number as a title, and a table beside it says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 480
HEIGHT: Final = 120
GAP: Final = 2


@dataclass(frozen=True)
class Rectangle:
    """One bar: where it stands, what it is called, and a second number on its foot (the failed among all)."""

    x: float
    y: float
    width: float
    height: float
    part_y: float
    part_height: float
    title: str


@dataclass(frozen=True)
class Chart:
    """Bars in a box of `width` × `height`; `top` is what the highest stands for, in words."""

    bars: list[Rectangle]
    top: str
    first: str
    last: str
    width: int = WIDTH
    height: int = HEIGHT


def chart(
    values: Sequence[float],
    titles: Sequence[str],
    *,
    parts: Sequence[float] | None = None,
    top: str = "",
    first: str = "",
    last: str = "",
) -> Chart:
    """A bar for each value; `parts` are drawn on their feet in another colour."""
    highest = max([*values, 0.0]) or 1.0
    step = WIDTH / max(len(values), 1)
    feet = parts or [0.0] * len(values)
    bars = []
    for number, (value, part, title) in enumerate(zip(values, feet, titles, strict=True)):
        height, foot = _height(value, highest), _height(part, highest)
        bars.append(
            Rectangle(
                x=round(number * step + GAP / 2, 2),
                y=round(HEIGHT - height, 2),
                width=round(step - GAP, 2),
                height=round(height, 2),
                part_y=round(HEIGHT - foot, 2),
                part_height=round(foot, 2),
                title=title,
            )
        )
    return Chart(bars, top, first, last)


def _height(value: float, highest: float) -> float:
    """At least two units for anything at all, so that one failure among thousands is seen."""
    return max(2.0, HEIGHT * value / highest) if value > 0 else 0.0
