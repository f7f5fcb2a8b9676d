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
]


def main() -> int:
    for name in ORDER:
        for vendor in ("postgresql", "sqlite"):
            path = RESULTS / f"{name}-{vendor}.json"
            if path.exists():
                kept = json.loads(path.read_text())
                for result in kept["results"]:
                    if "contestants" in result:
                        print(table(result, kept["machine"]))
    return 0


def table(result: dict[str, Any], machine: dict[str, Any]) -> str:
    """Medians, the least and the most of the rounds, ratios; the goals beneath."""
    lines = [
        f"| {result['title']}, {machine['database']} | median | least to most | ratio |",
        "|---|---:|---:|---|",
    ]
    for name, line in result["contestants"].items():
        values = [run["value"] if isinstance(run, dict) else run for run in line["runs"]]
        ratio = f"{line['ratio']:.2f} × {line['floor']}" if line["ratio"] is not None else ""
        lines.append(
            f"| {name} | {number(line['median'])} | {number(min(values))} to {number(max(values))} | {ratio} |"
        )
    for goal in result.get("goals", []):
        lines.append(
            f"\n- {'met' if goal['met'] else '**missed**'}: {goal['goal']}; reached {number(goal['reached'])}"
        )
    return "\n".join(lines).replace("\n\n- ", "\n- ").replace("|\n- ", "|\n\n- ", 1) + "\n"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 10 else f"{value:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
