"""Comments and docstrings of the product name only files that exist."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("frontend", "worker", "shared", "deploy")
# Files of other projects that comments name.
FOREIGN = {"convert_lora_to_gguf.py", "vllm/distributed/kv_events.py"}
FILE = re.compile(r"(?<![\w/.:{<>*-])((?:\w+/)*\w+\.(?:py|c|h))\b")
C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


@cache
def files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\n") if (ROOT / name).is_file()]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of every comment and docstring."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from ((source.count("\n", 0, found.start()) + 1, found[0]) for found in C_COMMENT.finditer(source))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield node.body[0].lineno, text


def missing(path: Path, known: set[str]) -> list[str]:
    """Returns the places of `path` that name a file which is in none of the `known` ends of paths."""
    return [
        f"{path.name}:{line}: {name}"
        for line, text in comments(path)
        for name in FILE.findall(text)
        if name not in known | FOREIGN
    ]


def ends(names: list[str], top: str) -> set[str]:
    """Returns the ends of the paths in `top` and in `shared`, such as x.py and engine/x.py, and all whole paths."""
    near = {name for name in names if name.split("/")[0] in (top, "shared")}
    return {"/".join(name.split("/")[at:]) for name in near for at in range(name.count("/") + 1)} | set(names)


@pytest.mark.parametrize("top", PRODUCT)
def test_comments_name_files_that_exist(top: str) -> None:
    names = files()
    known = ends(names, top)
    places = [name for name in names if name.startswith(f"{top}/") and name.endswith((".py", ".c", ".h"))]
    assert len(places) > 20 and [found for name in places for found in missing(ROOT / name, known)] == []


def test_dead_names_are_found_in_every_kind_of_comment(tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_text('"""See gone.py, and a/here.py."""\n# also here.py and lost/here.py\ntext = "other.py"\n')
    assert missing(file, ends(["frontend/a/here.py"], "frontend")) == ["one.py:2: lost/here.py", "one.py:1: gone.py"]
    (tmp_path / "two.c").write_text("/* gone.h */\nint x; // here.py\n")
    assert missing(tmp_path / "two.c", {"here.py"}) == ["two.c:1: gone.h"]
