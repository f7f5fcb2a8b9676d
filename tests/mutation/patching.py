"""Puts a change into a module that everybody has imported already."""

from __future__ import annotations

import importlib
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.mutation.sites import Mutant


def patch(mutant: Mutant) -> None:
    """Put the change into the imported module, where everybody already has hold of its functions and texts."""
    module = importlib.import_module(f"durable_jobs.{mutant.module}")
    assert module.__file__ is not None
    fresh = types.ModuleType(module.__name__)
    fresh.__file__, fresh.__package__ = module.__file__, module.__package__
    changed = mutant.applied(Path(module.__file__).read_bytes())
    sys.modules[f"{module.__name__}.changed"] = fresh
    exec(compile(changed, module.__file__, "exec", dont_inherit=True), vars(fresh))
    for name, new in list(vars(fresh).items()):
        if name.startswith("__") or name not in vars(module):
            continue
        old = getattr(module, name)
        if not transplanted(old, new, module.__name__):
            for other in list(sys.modules.values()):
                if other is not fresh and getattr(other, "__dict__", {}).get(name) is old:
                    setattr(other, name, new)


def transplanted(old: Any, new: Any, module: str) -> bool:
    """Make `old` behave as `new`; False for values that are to be replaced."""
    if isinstance(new, types.FunctionType) or hasattr(new, "cache_clear"):
        if new.__module__ == module:
            give_code(old, new)
        if hasattr(old, "cache_clear"):
            old.cache_clear()
        return True
    if isinstance(new, type):
        if new.__module__ == module:
            for name, value in list(vars(new).items()):
                replace_member(old, name, value)
        return True
    if type(new).__name__ == "Statement":
        old.__dict__ = new.__dict__
        return True
    if isinstance(new, dict) and any(type(value).__name__ == "Statement" for value in new.values()):
        old.clear()
        old.update(new)
        return True
    return not isinstance(new, int | float | str | tuple | list | dict | frozenset | set)


def give_code(old: Any, new: Any) -> None:
    inner_old, inner_new = getattr(old, "__wrapped__", None), getattr(new, "__wrapped__", None)
    if inner_old is not None and inner_new is not None:
        give_code(inner_old, inner_new)
        return
    if len(old.__code__.co_freevars) == len(new.__code__.co_freevars):
        old.__code__ = new.__code__
        give_defaults(old, new)


PLAIN = (int, float, str, tuple, type(None))


def give_defaults(old: Any, new: Any) -> None:
    """Values alone: an instance of the changed module's class would be none of the class that all others know."""
    if old.__defaults__ and new.__defaults__ and len(old.__defaults__) == len(new.__defaults__):
        pairs = zip(old.__defaults__, new.__defaults__, strict=True)
        old.__defaults__ = tuple(fresh if isinstance(fresh, PLAIN) else kept for kept, fresh in pairs)
    for name, fresh in (new.__kwdefaults__ or {}).items():
        if isinstance(fresh, PLAIN) and name in (old.__kwdefaults__ or {}):
            old.__kwdefaults__[name] = fresh


def replace_member(old: type, name: str, value: Any) -> None:
    there = vars(old).get(name)
    if isinstance(value, property) and isinstance(there, property):
        give_code(there.fget, value.fget)
    elif isinstance(value, staticmethod | classmethod) and there is not None:
        give_code(there.__func__, value.__func__)
    elif isinstance(value, types.FunctionType) and isinstance(there, types.FunctionType):
        if value.__code__.co_filename != "<string>":
            give_code(there, value)
        elif name == "__init__":
            # A dataclass's own: the fields' defaults stand here.
            give_defaults(there, value)
        elif name in ("__eq__", "__repr__"):
            give_code(there, value)
    elif isinstance(value, int | float | str | tuple) and not name.startswith("__"):
        with suppress(AttributeError, TypeError):
            setattr(old, name, value)
