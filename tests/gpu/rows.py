"""Print what `kit.py` measured as tables.

python tests/gpu/rows.py DIR
"""

import json
import sys
from pathlib import Path
from typing import Any

from sections import SECTIONS, Section


def cell(value: Any) -> str:
    """Return a value as it stands in a table: numbers to three digits, nothing for what was not measured."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value).replace("|", r"\|")


def table(section: Section, result: dict[str, Any]) -> list[str]:
    """Return the lines of a section's table; without figures, one line with the reason."""
    lines = [f"| {section.title} | {' | '.join(section.columns)} |", "|---" * (len(section.columns) + 1) + "|"]
    rows = {}
    for case, found in result.get("figures", {}).items():
        if shown := [cell(found.get(column)) for column in section.columns]:
            reason = f" ({found['reason']})" if "reason" in found else ""
            rows[f"{case}{reason}"] = shown
    if result["status"] != "done":
        cut = result["status"] if result["status"] == "not run" else "cut"
        rows[result.get("reason", cut)] = [""] * len(section.columns)
    return lines + [f"| {case} | {' | '.join(shown)} |" for case, shown in rows.items()]


def phases(result: dict[str, Any]) -> list[str]:
    """Return a line for each phase that a section has measured by itself."""
    return [
        f"- {case}, {phase}: {', '.join(f'{name} {cell(value)}' for name, value in numbers.items())}"
        for case, found in result.get("figures", {}).items()
        for phase, numbers in found.get("phases", {}).items()
        if isinstance(numbers, dict)
    ]


def main(folder: Path) -> None:
    """Print machine and tables; a section without JSON has a line that says so."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    known = [result for result in results.values() if "machine" in result]
    if any(result["small"] for result in known):
        print("SMALL RUN: these figures show that the kit runs, and are no results.\n")
    for described in dict.fromkeys(json.dumps([result["date"], result["machine"]]) for result in known):
        day, machine = json.loads(described)
        device, *rest = (f"{name} {cell(value)}" if name != "device" else value for name, value in machine.items())
        print(f"{device}: {', '.join(rest)}; {day}.\n")
    for name, section in SECTIONS.items():
        result = results.get(name, {"status": "not run"})
        print("\n".join([*table(section, result), "", *phases(result)]), end="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
