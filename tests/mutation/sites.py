"""What can be changed in a file: its Python, and the SQL in its texts, a word or a condition at a time."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """One change: the bytes from `start` to `end` become `new`. `owner` is the function, constant or snippet."""

    module: str
    owner: str
    operator: str
    number: int
    line: int
    start: int
    end: int
    old: str
    new: str
    vendor: str

    @property
    def id(self) -> str:
        return f"{self.module}:{self.owner}:{self.operator}:{self.number}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


@dataclass(frozen=True)
class _Change:
    operator: str
    start: int
    end: int
    new: str


COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
}
TELLS = {"log", "tell", "_logger", "logger"}
"""Calls whose loss nobody but a reader of logs would see."""

SQL = re.compile(
    r"\b(SELECT|UPDATE|INSERT|DELETE|WHERE|AND|SET|EXISTS|CASE)\b|= NULL\b|= :|= \{now\}|\{skip_locked\}"
)
WORDS = (
    ("null", r"\bIS NOT NULL\b", "IS NULL"),
    ("null", r"\bIS NULL\b", "IS NOT NULL"),
    ("exists", r"\bNOT EXISTS\b", "EXISTS"),
    ("bound", r"(?<=\s)<=(?=\s)", "<"),
    ("bound", r"(?<=\s)<(?=\s)", "<="),
    ("bound", r"(?<=\s)>=(?=\s)", ">"),
    ("bound", r"(?<=\s)>(?=\s)", ">="),
    ("unequal", r"(?<=\s)<>(?=\s)", "="),
    ("step", r"\+ 1\b", "+ 2"),
    ("order", r"\bDESC\b", ""),
    ("lock", r"\{skip_locked\}", ""),
    ("lock", r"\{lock\}", ""),
    ("either", r"\bOR\b", "AND"),
    ("status", r"'pending', 'running'", "'pending'"),
)
ENDS = re.compile(
    r"\b(AND|OR|ORDER|LIMIT|RETURNING|GROUP|THEN|ELSE|END|WHEN|UNION|FOR|ON|WHERE|SELECT|FROM|SET|HAVING|VALUES|AS)\b"
    r"|\{skip_locked\}|\{lock\}|\"\"\"|$"
)
ASSIGNMENT = re.compile(r"\s*[a-z_]+ = ")


def mutants_of(path: Path, module: str) -> list[Mutant]:
    """Every change of a file that this module knows, in the file's order."""
    source = path.read_bytes()
    tree = ast.parse(source)
    walk = _Walk(source)
    walk.visit(tree)
    numbers: Counter[tuple[str, str]] = Counter()
    found = []
    for owner, vendor, change in sorted(walk.found, key=lambda one: (one[2].start, one[2].end, one[2].new)):
        old = source[change.start : change.end].decode()
        if old == change.new or _is_broken(source, change, *walk.statement_around(change.start)):
            continue
        number = numbers[owner, change.operator]
        numbers[owner, change.operator] += 1
        line = source.count(b"\n", 0, change.start) + 1
        found.append(
            Mutant(
                module,
                owner,
                change.operator,
                number,
                line,
                change.start,
                change.end,
                old,
                change.new,
                vendor,
            )
        )
    return found


def _is_broken(source: bytes, change: _Change, begin: int, end: int) -> bool:
    """Whether the module's statement from `begin` to `end` is no Python any more."""
    try:
        compile(
            source[begin : change.start] + change.new.encode() + source[change.end : end], "mutant", "exec"
        )
    except (SyntaxError, ValueError):
        return True
    return False


class _Walk(ast.NodeVisitor):
    """Finds the changes of a module, and to whom they belong."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.found: list[tuple[str, str, _Change]] = []
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._owner: list[str] = []
        self._vendor = ""
        self._statements: list[ast.stmt] = []

    # --- places

    def statement_around(self, place: int) -> tuple[int, int]:
        """Where the module's own statement begins and ends that holds this byte; a decorator belongs to it."""
        for node in self._statements:
            end = self._span(node)[1]
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            if self._starts[first - 1] <= place < end:
                return self._starts[first - 1], end
        raise ValueError(f"byte {place} stands in no statement")

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return start, end

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _add(self, operator: str, start: int, end: int, new: str) -> None:
        owner = ".".join(self._owner) or "module"
        vendor = "postgresql" if operator == "sql lock" else self._vendor
        self.found.append((owner, vendor, _Change(operator, start, end, new)))

    def _replace(self, operator: str, node: ast.AST, new: str) -> None:
        self._add(operator, *self._span(node), new)

    def _between(self, operator: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.source[start:end].decode()
        if gap.count(old) == 1:
            self._add(operator, start, end, gap.replace(old, new))

    # --- owners

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        vendor = self._vendor
        for name in ("postgresql", "sqlite"):
            if node.name.endswith(f"_{name}"):
                self._vendor = name
        self._owner.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._body(node.body)
        self._owner.pop()
        self._vendor = vendor

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._owner.append(node.name)
        self._body(node.body)
        self._owner.pop()

    def visit_Module(self, node: ast.Module) -> None:
        self._statements = node.body
        self._body(node.body)

    def _body(self, body: list[ast.stmt]) -> None:
        for number, statement in enumerate(body):
            if number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._owner and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            vendor, self._vendor = self._vendor, "sqlite" if name.endswith("_SQLITE") else self._vendor
            self._owner.append(name)
            self.visit(node.value)
            self._owner.pop()
            self._vendor = vendor
            return
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._replace("drop", node, "pass")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None:
            return
        named = not self._owner and isinstance(node.target, ast.Name)
        if named:
            self._owner.append(node.target.id)  # type: ignore[union-attr]
        self.visit(node.value)
        if named:
            self._owner.pop()

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace("drop", node, "pass")
        self.visit(node.value)

    # --- Python

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if ast.unparse(node.value.func).partition(".")[0] in TELLS:
                return
            self._replace("drop", node, "pass")
        if not isinstance(node.value, ast.Constant):
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """Says what is so; without it everything goes on."""

    def visit_Import(self, node: ast.Import) -> None:
        """Nothing to change."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Nothing to change."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace("drop", node, "pass")
        # A message may say what it likes; what decides stands in the condition.

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace("return", node.value, "None")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        test = ast.unparse(node.test)
        if "vendor ==" in test:
            vendor = "sqlite" if "sqlite" in test else "postgresql"
            other = "postgresql" if vendor == "sqlite" else "sqlite"
            for branch, name in ((node.body, vendor), (node.orelse, other)):
                before, self._vendor = self._vendor, name
                self.visit(branch)
                self._vendor = before
            return
        self._condition(node.test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        simple = not isinstance(test, ast.Compare | ast.BoolOp)
        if simple and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace("condition", test, f"not ({self._text(test)})")

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in COMPARISONS:
                old, new = COMPARISONS[type(operator)]
                self._between("compare", left, right, old, new)
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("boolean", left, right, f"{old} ", f"{new} ")
        neutral = "True" if isinstance(node.op, ast.And) else "False"
        for value in node.values:
            self._replace("operand", value, neutral)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("not", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            old, new = ARITHMETIC[type(node.op)]
            self._between("arithmetic", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """In the snippets each key owns its text."""
        for key, value in zip(node.keys, node.values, strict=True):
            named = self._owner == ["_snippets"] and isinstance(key, ast.Constant)
            if named:
                self._owner.append(str(key.value))  # type: ignore[union-attr]
            self.visit(value)
            if named:
                self._owner.pop()

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "_statement" and len(node.args) == 2:
            for argument, vendor in zip(node.args, ("postgresql", "sqlite"), strict=True):
                before, self._vendor = self._vendor, vendor
                self.visit(argument)
                self._vendor = before
            return
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._replace("constant", node, str(not value))
        elif isinstance(value, int | float):
            self._replace("constant", node, repr(value + 1))
        elif isinstance(value, str):
            self._sql(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._sql(node)

    # --- SQL

    def _sql(self, node: ast.expr) -> None:
        begin, _ = self._span(node)
        text = self._text(node)
        if not SQL.search(text):
            return
        seen = set()
        for operator, start, end, new in _sql_changes(text):
            place = begin + len(text[:start].encode()), begin + len(text[:end].encode())
            if (place, new) not in seen:
                seen.add((place, new))
                self._add(f"sql {operator}", *place, new)


def _sql_changes(text: str) -> Iterator[tuple[str, int, int, str]]:
    for name, pattern, new in WORDS:
        for match in re.finditer(pattern, text):
            if name == "null" and text[: match.start()].rstrip().endswith("NOT"):
                continue
            yield name, match.start(), match.end(), new
    for match in re.finditer(r"\bAND\b", text):
        yield "condition", match.start(), _end(text, match.end()), ""
    for match in re.finditer(r"\bWHERE\b(?! true\b)", text):
        yield "condition", match.end(), _end(text, match.end()), " 1 = 1 "
    yield from _assignments(text)


def _end(text: str, begin: int) -> int:
    """Where the condition that begins here ends: at the next word of its own level."""
    depth, at = 0, begin
    while at < len(text):
        letter = text[at]
        if letter in "([":
            depth += 1
        elif letter in ")]":
            if not depth:
                return at
            depth -= 1
        elif letter == "," and not depth:
            return at
        elif letter == "'":
            at = text.find("'", at + 1)
            if at < 0:
                return len(text)
        elif not depth and (at == 0 or not text[at - 1].isalnum()) and ENDS.match(text, at):
            return at
        at += 1
    return len(text.rstrip('"'))


def _assignments(text: str) -> Iterator[tuple[str, int, int, str]]:
    """Each `column = value` of a list, so that one can be left out."""
    lists = [match.end() for match in re.finditer(r"\bSET\b", text)]
    opened = re.match(r'f?"+', text)
    if opened and ASSIGNMENT.match(text, opened.end()):
        lists.append(opened.end())
    for begin in lists:
        parts, at = [], begin
        while True:
            end = _end(text, at)
            parts.append((at, end))
            if end >= len(text) or text[end] != ",":
                break
            at = end + 1
        if len(parts) < 2:
            continue
        for number, (start, end) in enumerate(parts):
            if not ASSIGNMENT.match(text, start):
                continue
            if number + 1 < len(parts):
                yield "assignment", start, end + 1, ""
            else:
                yield "assignment", start - 1, end, " "


# --- who uses what


def users(path: Path) -> dict[str, set[str]]:
    """For each name of a module's top level and each snippet: the functions that come to use it."""
    source = path.read_text()
    tree = ast.parse(source)
    texts: dict[str, str] = {}
    functions: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            functions.add(node.name)
            if node.name == "_snippets":
                texts.update(_snippets(node, source))
            else:
                texts[node.name] = ast.get_source_segment(source, node) or ""
        elif isinstance(node, ast.ClassDef):
            texts[node.name] = ast.get_source_segment(source, node) or ""
            functions |= {
                f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)
            }
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                texts[target.id] = ast.get_source_segment(source, node) or ""
    used_by: dict[str, set[str]] = defaultdict(set)
    for user, text in texts.items():
        for name in {*re.findall(r"\b[A-Za-z_]\w*\b", text), *re.findall(r"\{+(\w+)", text)}:
            if name in texts and name != user:
                used_by[name].add(user)
                used_by[f"_snippets.{name}"].add(user)
    return {name: _closure(name, used_by) for name in [*texts, *(f"_snippets.{name}" for name in texts)]}


def _snippets(node: ast.FunctionDef, source: str) -> dict[str, str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            return {
                str(key.value): ast.get_source_segment(source, value) or ""
                for key, value in zip(inner.keys, inner.values, strict=True)
                if isinstance(key, ast.Constant)
            }
    return {}


def _closure(name: str, used_by: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        for user in used_by.get(waiting.pop(), ()):
            if user not in reached:
                reached.add(user)
                waiting.append(user)
    return reached
