"""A page's Python, run in its order in one namespace, with a shop app for its imports."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from durable_jobs import kinds
from durable_jobs.kinds import Done, Kind
from tests.pages import shop
from tests.pages.shop import models
from tests.postgres import ROOT

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Page = Callable[..., dict[str, Any]]


class Reprice(Kind):
    """What the pages start."""

    name = "shop.reprice"

    def step(self, ctx: Any) -> Done:
        return Done()


def text_of(name: str) -> str:
    folder = ROOT if name.isupper() else ROOT / "docs"
    return (folder / f"{name}.md").read_text(encoding="utf-8")


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch, db: None) -> Iterator[Page]:
    """Run all of a page's Python, with some names given; gives those that it has then.

    Its kinds are forgotten afterwards.
    """
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setitem(sys.modules, "shop.models", models)
    before = dict(kinds._kinds)
    kinds.register(Reprice)

    def run(name: str, **names: Any) -> dict[str, Any]:
        for number, block in enumerate(PYTHON.findall(text_of(name)), 1):
            exec(compile(block, f"{name}.md, block {number}", "exec"), names)
        return names

    yield run
    kinds._kinds.clear()
    kinds._kinds.update(before)
