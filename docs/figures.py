"""Pages whose figures are made by their own code, when the pages are built.

    python docs/figures.py docs/worked_example.md docs/zh/worked_example.md     # write them into the pages as well

The pages hold the figures of the last such run, so that they can be read as they are. A build makes its own, and
`tests/test_docs.py` compares both. A page is executed if it has a comment of the second or third kind:

- A block of Python that is shown. If a block of text follows, that is what it printed.
- A comment `<!-- python … -->` of Python that is not shown. It prints the rows of the table that follows, whose header
  stays.
- A number with a comment, `0.038<!--= advantages[0] -->`: the value of the expression after the last block, with the
  decimals that stand there.

All blocks of a page share a namespace. They run in an empty folder in which `recipes` is that of the repository.
"""

import functools
import os
import re
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

PART = re.compile(
    r"^```python\n(?P<shown>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?"
    r"|^<!-- python\n(?P<hidden>.*?)^-->\n(?:\n(?P<header>(?:\|[^\n]*\n){2})(?:\|[^\n]*\n)*)?"
    r"|(?P<number>[−+]?\d[\d.,]*)(?P<comment><!--= (?P<expression>.*?) -->)",
    flags=re.DOTALL | re.MULTILINE,
)


def is_executed(page: str) -> bool:
    return "<!-- python\n" in page or "<!--= " in page


@functools.cache
def run(blocks: tuple[str, ...]) -> tuple[list[str], dict[str, Any]]:
    """What each block printed, and the namespace after the last one; pages with the same code share a run."""
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = []
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.symlink(ROOT / "recipes", "recipes")
        for number, block in enumerate(blocks):
            with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
                exec(compile(block, f"block {number}", "exec"), namespace)
            lines = [line.rstrip() for line in out.getvalue().splitlines()]
            printed.append("\n".join(lines).strip("\n") + "\n" if any(lines) else "")
    return printed, namespace


def formatted(value: float, like: str) -> str:
    """The value with as many decimals as `like`, its commas between thousands, and a minus sign as in print."""
    commas = "," if "," in like else ""
    return f"{value:{commas}.{len(like.partition('.')[2])}f}".replace("-", "−")


def renewed(page: str) -> str:
    """The page with new figures."""
    blocks = tuple(m["shown"] or m["hidden"] for m in PART.finditer(page) if not m["number"])
    printed, namespace = run(blocks)
    outputs = iter(printed)

    def renew(part: re.Match[str]) -> str:
        if part["number"]:
            return formatted(eval(part["expression"], namespace), part["number"]) + part["comment"]
        output = next(outputs)
        if part["text"] is not None:
            return f"```python\n{part['shown']}```\n\n```text\n{output}```\n"
        if part["header"] is not None:
            return f"<!-- python\n{part['hidden']}-->\n\n{part['header']}{output}"
        return part[0]

    return PART.sub(renew, page)


def renew_source(app: Any, name: str, source: list[str]) -> None:
    """Sphinx's `source-read`: new figures, without the comments that they come from."""
    if is_executed(source[0]):
        source[0] = re.sub(r"^<!-- python\n.*?^-->\n|<!--= .*? -->", "", renewed(source[0]), flags=re.DOTALL | re.M)


def readable_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """autodoc's `autodoc-process-docstring`: docstrings are plain text with backticks, not reStructuredText."""
    lines[:] = [re.sub(r"`([^`]+)`", r"``\1``\\ ", line.replace("|", r"\|")) for line in lines]


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", renew_source)
    app.connect("autodoc-process-docstring", readable_docstring, priority=400)  # before napoleon
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(renewed(path.read_text()))
