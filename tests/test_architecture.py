"""Imports point one way, and `store.py` alone writes job rows: held to tables, told by file and line."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_database

PACKAGE = Path(__file__).resolve().parent.parent / "durable_jobs"

LAYERS = (
    # A module may import what stands above its line, and its own line as long as no circle comes of it.
    ("exceptions", "logs"),
    ("conf", "jsontext", "database", "keyset"),
    ("models", "outage", "connection", "filewatch"),
    ("kinds", "batch", "signals"),
    ("store",),
    ("keeper", "lifecycle", "bounded"),
    ("runner", "receipts"),
    ("transports",),
    (
        "service",
        "explain",
        "selection",
        "reconciler",
        "manager",
        "overview",
        "pruning",
        "candidates",
        "access",
    ),
    (
        "worker",
        "upkeep",
        "consumer",
        "admin",
        "rest",
        "tasks",
        "checks",
        "metrics",
        "telemetry",
        "templatetags",
    ),
    ("supervisor",),
    ("management", "testing"),
    ("apps",),
)

BACKWARDS = {
    ("kinds", "batch"): "re-exported lazily, so that authors import both from one place",
}

OPTIONAL = {
    # Packages that an installation may do without, and the only places that import them.
    "rest_framework": ("rest",),
    "drf_spectacular": ("rest",),
    "django_filters": ("rest",),
    "celery": ("transports",),
    "prometheus_client": ("metrics", "rest"),
    "opentelemetry": ("telemetry",),
    "django_tasks": ("tasks",),
    "psycopg": ("transports", "database"),
    "pytest": ("testing",),
    "rich": ("management",),
}
ALWAYS = {"django", "asgiref", "durable_jobs", *sys.stdlib_module_names}  # Django brings asgiref along

TABLES = r"durable_jobs_(?:job|event|cancelrequest|pause|worker)\b"
WRITING_SQL = re.compile(
    rf"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO|TRUNCATE(?:\s+TABLE)?|COPY)\s+(?:ONLY\s+)?\"?"
    rf"(?:{TABLES}|\{{+job\}}+)",
    re.IGNORECASE,
)
MODELS = {"Job", "JobEvent", "CancelRequest", "Pause", "WorkerProcess"}
WRITES = {
    "save", "asave", "save_base", "delete", "adelete", "update", "aupdate", "create", "acreate",
    "bulk_create", "abulk_create", "bulk_update", "abulk_update", "get_or_create", "aget_or_create",
    "update_or_create", "aupdate_or_create", "_raw_delete", "_update", "_insert",
}  # fmt: skip


# --- imports -----------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """The first name below the package: a file's or a folder's."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Every imported dotted name, its line, and whether it is there for types only."""
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            if node.module == "durable_jobs":
                names = [f"durable_jobs.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.lineno, id(node) in for_types


def wrong_imports(module: str, source: str, path: str) -> Iterator[str]:
    """What of a module's imports the tables do not allow."""
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    if module not in rank:
        yield f"{path}:1: {module} stands in no layer; give it a place in LAYERS"
        return
    for name, line, for_types in imports(ast.parse(source)):
        first, _, rest = name.partition(".")
        if first in ("project", "tests"):
            yield f"{path}:{line}: the package does not know {first}"
        elif first == "durable_jobs":
            target = rest.partition(".")[0]
            if target in ("", "__version__") or target == module or for_types:
                continue
            if target not in rank:
                yield f"{path}:{line}: {target} stands in no layer; give it a place in LAYERS"
            elif rank[target] > rank[module] and (module, target) not in BACKWARDS:
                yield f"{path}:{line}: {module} imports {target}, which stands below it in LAYERS"
        elif module in OPTIONAL.get(first, ()):
            continue
        elif first in OPTIONAL:
            yield f"{path}:{line}: {first} is optional; only {', '.join(OPTIONAL[first])} may import it"
        elif first not in ALWAYS:
            yield f"{path}:{line}: {first} is not among the package's dependencies"


def sources() -> list[Path]:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if "migrations" not in path.parts]
    return [path for path in files if path != PACKAGE / "__init__.py"]


def test_imports_point_one_way() -> None:
    wrong = [
        line
        for path in sources()
        for line in wrong_imports(module_of(path), path.read_text(), str(path.relative_to(PACKAGE.parent)))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_circle_within_a_layer() -> None:
    graph: dict[str, set[str]] = {}
    for path in sources():
        module = module_of(path)
        for name, _, for_types in imports(ast.parse(path.read_text())):
            target = name.removeprefix("durable_jobs.").partition(".")[0]
            inner = not name.startswith("durable_jobs.") or target == module or for_types
            if not inner and (module, target) not in BACKWARDS:
                graph.setdefault(module, set()).add(target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as circle:
        pytest.fail(f"imports in a circle: {' ← '.join(circle.args[1])}")


def test_the_picture_for_contributors_is_the_table() -> None:
    picture = (
        (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("flowchart TD\n")[2].partition("```")[0]
    )
    boxes = dict(re.findall(r'(\w+)\["([^"]+)"\]', picture))
    plain = re.sub(r'\["[^"]+"\]', "", picture)
    arrows = [
        (before, after) for line in plain.splitlines() for before, after in pairwise(line.split(" --> "))
    ]
    drawn = {name: boxes.get(name.strip(), name.strip()).split(" · ") for name in chain(*arrows)}
    rank = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    assert {module for told in drawn.values() for module in told} == set(rank)
    for before, after in arrows:
        upper, lower = drawn[before], drawn[after]
        assert min(rank[module] for module in upper) > max(rank[module] for module in lower), (upper, lower)


def test_the_table_names_what_is_there() -> None:
    there = {module_of(path) for path in sources()}
    assert {name for layer in LAYERS for name in layer} == there


@pytest.mark.parametrize(
    ("module", "source", "told"),
    [
        ("store", "x = 1\nfrom durable_jobs.service import start", ":2: store imports service"),
        ("store", "def f():\n    import durable_jobs.runner", ":2: store imports runner"),
        ("conf", "from durable_jobs import models", ":1: conf imports models"),
        ("kinds", "from durable_jobs.store import claim", "kinds imports store"),
        ("models", "import project.demo", "does not know project"),
        ("store", "import rest_framework.views", "rest_framework is optional"),
        ("worker", "from celery import Celery", "celery is optional"),
        ("store", "import requests", "requests is not among"),
        ("novelty", "", "novelty stands in no layer"),
        ("worker", "from durable_jobs.novelty import x", "novelty stands in no layer"),
    ],
)
def test_a_planted_import_is_told(module: str, source: str, told: str) -> None:
    (line,) = wrong_imports(module, source, f"durable_jobs/{module}.py")
    assert told in line and line.startswith(f"durable_jobs/{module}.py:")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("service", "from durable_jobs import store, transports\nimport json, django.db"),
        ("kinds", "def __getattr__(name):\n    from durable_jobs import batch"),
        ("kinds", "if TYPE_CHECKING:\n    from durable_jobs.runner import SliceContext"),
        ("rest", "from rest_framework import views\nfrom durable_jobs.rest import filters"),
        ("store", "from durable_jobs import __version__"),
    ],
)
def test_an_allowed_import_is_not_told(module: str, source: str) -> None:
    assert not list(wrong_imports(module, source, "x.py"))


# --- writers -----------------------------------------------------------------------------------------------------


def writers(source: str, path: str) -> list[str]:
    """SQL that writes a table of the package, and calls that write through one of its models."""
    tree = ast.parse(source)
    found = [
        (node.lineno, f"SQL: {match[0]}")
        for node in ast.walk(tree)
        if (text := text_of(node)) is not None and (match := WRITING_SQL.search(text))
    ]
    ours = names_of_jobs(tree)
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in WRITES and root_of(called.value) in ours:
            found.append((node.lineno, f"call: {ast.unparse(called)}(…)"))
    return [f"{path}:{line}: {what}" for line, what in sorted(set(found))]


def text_of(node: ast.AST) -> str | None:
    """A string, or an f-string with `{job}` for whatever names the table."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            else:
                told = ast.unparse(value)
                parts.append("{job}" if "JOB_TABLE" in told or "db_table" in told else "?")
        return "".join(parts)
    return None


def names_of_jobs(tree: ast.AST) -> set[str]:
    """The names that stand for a model of ours, a queryset of it or one of its instances."""
    names = {"job", *(f"models.{name}" for name in MODELS)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "durable_jobs.models":
            names |= {alias.asname or alias.name for alias in node.names if alias.name in MODELS}
    for _ in range(3):  # a name given to a name
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For):
                value = node.iter if isinstance(node, ast.For) else node.value
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if value is not None and root_of(value) in names:
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def root_of(node: ast.AST) -> str | None:
    """The name at the start of a chain such as `Job.objects.filter(…)[0]`; `models.Job` counts as one."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute) and node.attr in MODELS:
            return f"models.{node.attr}"
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def test_only_the_store_writes_rows() -> None:
    """T2, B20: a save from a stale instance would erase the fence."""
    wrong = [
        line
        for path in sources()
        if path.name != "store.py"
        for line in writers(path.read_text(), str(path.relative_to(PACKAGE.parent)))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_scanner_sees_what_the_store_does() -> None:
    """It would be worth nothing if it found nothing there."""
    assert len(writers((PACKAGE / "store.py").read_text(), "store.py")) > 25


@pytest.mark.parametrize(
    ("number", "planted"),
    [
        (1, 'cursor.execute("UPDATE durable_jobs_job SET status = 1")'),
        (1, 'cursor.execute("""\n  insert  into durable_jobs_event (id)""")'),
        (1, 'cursor.execute("DELETE FROM durable_jobs_cancelrequest")'),
        (1, 'execute(f"UPDATE {JOB_TABLE} SET x = {y}")'),
        (1, 'execute(f"DELETE FROM {Job._meta.db_table} WHERE id = %s")'),
        (1, 'X = _statement("UPDATE {job} SET x = 1")'),
        (2, "from durable_jobs.models import Job\nJob.objects.filter(pk=1).update(status='x')"),
        (2, "from durable_jobs.models import Job as Row\nRow._base_manager.bulk_create([])"),
        (
            4,
            "from durable_jobs.models import Job\nrows = Job._base_manager.all()\nrows = rows.filter()\nrows.delete()",
        ),
        (2, "from durable_jobs import models\nmodels.Job(kind='k').save()"),
        (2, "from durable_jobs.models import Pause\nPause._base_manager.get_or_create(kind='k')"),
        (3, "def hook(job):\n    job.status = 'x'\n    job.save(update_fields=['status'])"),
        (1, "job.events.create(event='x')"),
        (3, "from durable_jobs.models import Job\nfor one in Job.objects.all():\n    one.delete()"),
        (2, "from durable_jobs.models import JobEvent\nawait_(JobEvent._base_manager.acreate())"),
    ],
)
def test_a_planted_writer_is_told(number: int, planted: str) -> None:
    (line,) = writers(planted, "planted.py")
    assert line.startswith(f"planted.py:{number}: ")


@pytest.mark.parametrize(
    "harmless",
    [
        'cursor.execute("SELECT * FROM durable_jobs_job")',
        '"UPDATE is a word, durable_jobs_job is another"',
        "known.update({}); cache.delete('x'); form.save()",
        "from durable_jobs.models import Job\nJob.objects.filter(pk=1).first()",
        "rows = self._model()._base_manager.using(x).filter(pk=job.subject_id)\nrows.update(status='done')",
        'execute("UPDATE catalog_import SET state = 1")',
    ],
)
def test_a_reader_is_not_told(harmless: str) -> None:
    assert not writers(harmless, "harmless.py")


# --- surfaces --------------------------------------------------------------------------------------------------------

SURFACES = ("admin", "rest", "management")


def writing_functions() -> set[str]:
    """The functions of the store that write: they open a statement, or run one that changes rows."""
    tree = ast.parse((PACKAGE / "store.py").read_text())
    writing = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and any(WRITING_SQL.search(text_of(part) or "") for part in ast.walk(node))
        for name in [ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)]
    }
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any(
            (isinstance(part, ast.Name) and part.id in writing)
            or (isinstance(part, ast.Attribute) and ast.unparse(part) == "database.statement")
            for part in ast.walk(node)
        )
    }


def test_every_surface_acts_through_the_service() -> None:
    """B173: admin, REST and commands call the same functions; none of them writes by itself."""
    writing = writing_functions()
    assert {"insert", "request_cancel", "redrive", "complete", "take_orphan", "beat_many"} <= writing
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {ast.unparse(node)}"
        for path in sources()
        if path.relative_to(PACKAGE).parts[0] in SURFACES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id == "lifecycle" or (node.value.id == "store" and node.attr in writing))
    ]
    assert not wrong, "\n" + "\n".join(wrong)
