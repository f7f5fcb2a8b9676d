"""What the soak takes away from its workers is still there to be taken away; that the soak notices, its runs show."""

from __future__ import annotations

import pytest

from durable_jobs import lifecycle, store
from tests.soak.breaking import OF_A_BEAT, break_what_is_asked


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name that is broken here gets its value back."""
    monkeypatch.setattr(store, "_OWNED", store._OWNED)
    monkeypatch.setattr(store._BEAT_MANY, "_templates", dict(store._BEAT_MANY._templates))
    for name in ("_run_hooks", "_complete_mirrored"):
        monkeypatch.setattr(lifecycle, name, getattr(lifecycle, name))


def test_the_fence_can_be_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_JOBS_SOAK_BREAK", "fence")
    break_what_is_asked()
    assert "lease" not in store._OWNED
    for vendor, conditions in OF_A_BEAT.items():
        assert not any(condition in store._BEAT_MANY._templates[vendor] for condition in conditions)


def test_the_hooks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lifecycle._run_hooks, lifecycle._complete_mirrored
    monkeypatch.setenv("DURABLE_JOBS_SOAK_BREAK", "hooks")
    break_what_is_asked()
    assert lifecycle._run_hooks is not before[0] and lifecycle._complete_mirrored is not before[1]


def test_nothing_is_broken_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    before = store._OWNED, lifecycle._run_hooks
    monkeypatch.delenv("DURABLE_JOBS_SOAK_BREAK", raising=False)
    break_what_is_asked()
    assert (store._OWNED, lifecycle._run_hooks) == before
