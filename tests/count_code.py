"""How much code there is: lines without blanks, comments and docstrings, a folder a row.

    .venv/bin/python -m tests.count_code [REF] [--folder FOLDER ...]

Of a commit, or of the working tree. A line counts once, however much is on it; a line inside a string that is
no docstring counts, too.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """The lines of `source` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ref", nargs="?", help="a commit; by default the working tree")
    parser.add_argument("--folder", nargs="+", default=["hpml", "components", "serving", "pipelines"])
    given = parser.parse_args()
    lines: Counter[str] = Counter()
    for name, source in _sources(given.ref, given.folder):
        lines["/".join(Path(name).parts[:2]) if Path(name).parent.parts[1:] else Path(name).parts[0]] += (
            code_lines(source)
        )
    for folder, count in sorted(lines.items()):
        print(f"{count:7,}  {folder}")
    print(f"{sum(lines.values()):7,}  in all")


def _sources(ref: str | None, folders: list[str]) -> Iterator[tuple[str, str]]:
    """The Python files below `folders` that git knows, links left out, and their text."""
    listing = ["git", "ls-tree", "-r", "--name-only", ref, *folders] if ref else ["git", "ls-files", *folders]
    for name in _git(*listing[1:]).splitlines():
        if name.endswith(".py"):
            yield name, _git("show", f"{ref}:{name}") if ref else (ROOT / name).read_text()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
