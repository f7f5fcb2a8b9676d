"""`python -m benchmarks.report`: what `benchmarks/results/` holds, as the tables of docs/performance.md."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.harness import RESULTS

ORDER = [
    "drain",
    "pickup",
    "start",
    "heartbeat",
    "slices",
    "million",
    "idle",
    "checkpoint",
    "recovery",
    "peers",
    "admin",
    "rest",
]


def main() -> int:
    tables, goals = [], ["| database | goal | reached | |", "|---|---|---:|---|"]
    for name in ORDER:
        for vendor in ("postgresql", "sqlite"):
            path = RESULTS / f"{name}-{vendor}.json"
            if not path.exists():
                continue
            kept = json.loads(path.read_text())
            database = kept["machine"]["database"]
            for result in kept["results"]:
                if "rows" in result:
                    tables.append(plain_table(result, database))
                if "contestants" not in result:
                    continue
                tables.append(table(result, database))
                goals += [
                    f"| {database} | {goal['goal']} | {number(goal['reached'])} | {'met' if goal['met'] else '**missed**'} |"
                    for goal in result["goals"]
                ]
    print("\n".join(goals), *tables, sep="\n\n")
    return 0


def table(result: dict[str, Any], database: str) -> str:
    """Medians, the least and the most of the rounds, ratios."""
    lines = [f"| {result['title']}, {database} | median | least to most | ratio |", "|---|---:|---:|---|"]
    for name, line in result["contestants"].items():
        values = [run["value"] if isinstance(run, dict) else run for run in line["runs"]]
        ratio = f"{line['ratio']:.2f} × {line['floor']}" if line["ratio"] is not None else ""
        lines.append(
            f"| {name} | {number(line['median'])} | {number(min(values))} to {number(max(values))} | {ratio} |"
        )
    return "\n".join(lines)


def plain_table(result: dict[str, Any], database: str) -> str:
    """What was measured once, as it is."""
    first, *columns = result["columns"]
    lines = [f"| {first}, {database} | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    lines += [f"| {row[0]} | {' | '.join(map(number_or_text, row[1:]))} |" for row in result["rows"]]
    return "\n".join(lines)


def number_or_text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
