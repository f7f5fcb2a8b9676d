"""Changes after which everything happens as before, and why; they count neither as noticed nor as missed."""

from __future__ import annotations

from tests.mutation.sites import Mutant

EQUIVALENT: dict[tuple[str, str, str], str] = {}
"""By module and owner, old text, new text, with blanks as one."""


def reason_of(mutant: Mutant) -> str:
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return EQUIVALENT.get((f"{mutant.module}:{mutant.owner}", old, new), "")
