"""Comments and docstrings of the product name only files and folders that exist."""

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
FOLDER = re.compile(r"\(((?:[a-z_]+/)+[a-z_]+)\)")  # alone in parentheses: elsewhere a slash also separates words
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
    """Returns the places of `path` that name a file or folder which is in none of the `known` ends of paths."""
    return [
        f"{path.name}:{line}: {name}"
        for line, text in comments(path)
        for name in FILE.findall(text) + FOLDER.findall(text)
        if name not in known | FOREIGN
    ]


def ends(names: list[str], top: str) -> set[str]:
    """Returns the ends of the paths in `top` and in `shared`, such as x.py and engine/x.py, and all whole paths, of
    files and of folders.
    """
    paths = set(names) | {name.rpartition("/")[0] for name in names}
    near = {path for path in paths if path.split("/")[0] in (top, "shared")}
    return {"/".join(path.split("/")[at:]) for path in near for at in range(path.count("/") + 1)} | paths


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
    (tmp_path / "three.py").write_text("# the kind (frontend/a), and/or its name (a/lost)\n")
    assert missing(tmp_path / "three.py", ends(["frontend/a/here.py"], "frontend")) == ["three.py:1: a/lost"]


def test_readme_of_deploy_names_all_of_its_folders() -> None:
    table = re.findall(r"^\| (`[a-z-]+/`.*?) \|", (ROOT / "deploy/README.md").read_text(), re.MULTILINE)
    named = {folder for row in table for folder in re.findall(r"`([a-z-]+)/`", row)}
    assert named == {name.split("/")[1] for name in files() if name.startswith("deploy/") and name.count("/") > 1}
