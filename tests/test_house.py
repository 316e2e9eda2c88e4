"""Imports go only downward, files and folders import each other in no circle, and the closures do not grow.

FLOORS has the order. A file may import what stands on a lower floor, and what lies in its own folder.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
PRODUCT = ("shared", "frontend", "worker", "deploy")
OURS = (*PRODUCT, "bench")
TENSORS = {"torch", "numpy", "triton", "transformers", "safetensors"}
HTTP = {"starlette", "uvicorn", "sse_starlette", "httptools", "uvloop", "fastapi"}

# From the ground up. A name is a folder with all that is in it, or a file.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("shared",),
    ("frontend/errors.py", "frontend/lora.py", "worker/spec.py", "frontend/turns.py"),
    ("frontend/text", "frontend/output_parser", "frontend/workers", "worker/ops"),
    ("frontend/request.py", "worker/device.py", "worker/operations.py", "worker/checkpoint", "worker/kv_cache"),
    ("frontend/schema", "frontend/generation", "frontend/server", "worker/scheduler", "worker/quantization"),
    ("frontend/model_context.py", "frontend/observability", "frontend/kept", "worker/models"),
    ("frontend/chat", "worker/lora", "worker/vision"),
    ("frontend/model_table.py", "frontend/structured_output", "worker/structured_output", "worker/distributed"),
    ("frontend/app_state.py", "worker/model_runner"),
    ("frontend/api", "worker/spec_decode", "worker/encoder"),
    ("frontend/routes", "frontend/launcher_link.py", "worker/engine"),
    ("frontend/loaded_models.py", "frontend/app.py", "worker/follower.py", "worker/follower.py"),
    ("frontend/__main__.py", "worker/__main__.py"),
    ("deploy",),
)
# (importing file, imported file) → why it may point upward
UPWARD: Mapping[tuple[str, str], str] = {}
# Folders that import each other, each with its reason: the folders of a circle can only be read together.
CIRCLES: Mapping[tuple[str, ...], str] = {}
# path → top-level modules that it may not import, at any place in the file
FORBIDDEN = {
    "frontend": {"worker", "deploy", "bench", "tests", "gguf", *TENSORS},
    "worker": {"frontend", "deploy", "bench", "tests", "tokenizers", "gguf", *HTTP},
    "shared": {"frontend", "worker", "deploy", "bench", "tests", *TENSORS, *HTTP},
    "deploy": {"tests", "bench", "gguf"},
    "bench": {"tests"},
    "worker/scheduler": TENSORS,
    "worker/kv_cache/prefix_cache.py": TENSORS,
    "worker/kv_cache/pages.py": TENSORS,
}
# What the tree has reached. Whoever makes a number smaller writes it here.
MOST = {
    "product files": 496,
    "folders": 69,
    "files that serve a chat": 100,
    "files of a chat and the start": 178,
}
BARE = 20  # an __init__.py of at most this many lines is a folder's sign, and no file to read


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """Returns the full names of all that a file imports, and whether this happens when the file itself is imported."""
    return tuple(_imports(ast.parse(path.read_text(), str(path)).body, True))


def _imports(body: Iterable[ast.stmt], at_once: bool) -> Iterator[tuple[str, bool]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", at_once) for alias in node.names)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for field in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, field, ()), at_once and not inside and not types)
            for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _imports(each.body, at_once and not inside)


@cache
def file_of(module: str) -> Path | None:
    """Returns the file of the module, or of the object in a module, that has this full name; None if it is not ours."""
    path = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] not in OURS:
        return None
    files = (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py"), path.parent / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def targets(path: Path) -> set[Path]:
    """Returns the files of ours that a file imports when it is imported itself."""
    found = {file_of(module) for module, at_once in imports(path) if at_once}
    return {file for file in found if file is not None and file != path}


def is_bare(path: Path) -> bool:
    return path.name == "__init__.py" and len(path.read_text().splitlines()) <= BARE


def closure(*starts: str) -> set[Path]:
    """Returns all files that these files import at module level, directly or not. Bare __init__.py are left out."""
    waiting, seen = [ROOT / start for start in starts], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += targets(path)
    return {path for path in seen if not is_bare(path)}


def floor(name: str) -> int | None:
    places = ((number, place) for number, names in enumerate(FLOORS) for place in names)
    return next((number for number, place in places if name == place or name.startswith(f"{place}/")), None)


def place(name: str) -> str:
    """Returns a file's node in the search for circles: its folder, or the file itself if it lies in a top folder."""
    folder = name.rpartition("/")[0]
    return folder if "/" in folder else name


def graph(node: bool) -> dict[str, set[str]]:
    """Returns who imports whom: files, or their folders (node)."""
    found: dict[str, set[str]] = {}
    for path in (path for top in PRODUCT for path in sources(top) if not is_bare(path)):
        own = place(named(path)) if node else named(path)
        to = {named(each) for each in targets(path) if not is_bare(each)}
        found.setdefault(own, set()).update({place(one) for one in to} - {own} if node else to)
    return found


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Returns the groups of nodes that reach each other; a group is in the order of names."""

    def reached(start: str) -> set[str]:
        seen, open_nodes = set[str](), [start]
        while open_nodes:
            for node in graph.get(open_nodes.pop(), set()) - seen:
                seen.add(node)
                open_nodes.append(node)
        return seen

    all_reached = {node: reached(node) for node in graph}
    groups = {tuple(sorted(to for to in seen if node in all_reached.get(to, ()))) for node, seen in all_reached.items()}
    return {group for group in groups if len(group) > 1}


def test_every_folder_stands_on_a_floor() -> None:
    assert [
        named(path) for top in PRODUCT for path in sources(top) if not is_bare(path) and floor(named(path)) is None
    ] == []


def test_imports_go_downward() -> None:
    found = set()
    for path in (path for top in PRODUCT for path in sources(top) if not is_bare(path)):
        own = named(path)
        for to in (named(each) for each in targets(path) if not is_bare(each)):
            same = place(own) == place(to) or own.split("/")[:2] == to.split("/")[:2]
            here, there = floor(own), floor(to)
            if not same and here is not None and there is not None and there > here:
                found.add((own, to))
    assert found == set(UPWARD), "a new import that points upward, or one that is gone and leaves the list"


def test_files_import_each_other_in_no_circle() -> None:
    assert circles(graph(node=False)) == set()


def test_folders_import_each_other_in_no_circle_but_those_listed() -> None:
    assert circles(graph(node=True)) == set(CIRCLES), "a new circle, or one that is gone and leaves the list"


def test_circles_finds_groups_that_reach_each_other() -> None:
    graph = {"a": {"b"}, "b": {"c", "b"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == {("a", "b", "c"), ("f", "g")}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_folder_imports_nothing_that_is_forbidden(folder: str) -> None:
    assert sources(folder), "the folder has moved: change the rule, too"
    found = [(named(path), one) for path in sources(folder) for one, _ in imports(path)]
    assert [(file, one) for file, one in found if one.split(".")[0] in FORBIDDEN[folder]] == []


def test_imports_finds_every_kind_of_import(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text(
        "import torch.nn as nn\n"
        "if TYPE_CHECKING:\n"
        "    from frontend.text import tokenizer\n"
        "def late():\n"
        "    from worker import loop\n"
        "try:\n"
        "    import a.b\n"
        "except ImportError:\n"
        "    import c\n"
    )
    expected = [
        ("torch.nn", True), ("frontend.text.tokenizer", False), ("worker.loop", False), ("a.b", True), ("c", True),
    ]  # fmt: skip
    assert list(imports(path)) == expected


def test_the_tree_has_not_grown() -> None:
    files = [path for top in PRODUCT for path in sources(top)]
    chat, start = ("frontend/api/openai/chat.py", "frontend/routes/generate.py"), ("worker/__main__.py",)
    found = {
        "product files": len(files),
        "folders": len({path.parent for top in OURS for path in sources(top)}),
        "files that serve a chat": len(closure(*chat, "worker/engine/loop.py", "worker/engine/transport.py")),
        "files of a chat and the start": len(closure(*chat, *start)),
    }
    assert all(found[name] <= MOST[name] for name in MOST), found
    assert statistics.median(len(path.read_text().splitlines()) for path in files if not is_bare(path)) >= 150
    assert max(len(path.relative_to(ROOT).parts) for path in files) <= 4, "two folders below a top folder, at most"


def test_frontend_loads_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "numpy", "gguf", "worker"}
    check = f"import sys, frontend.app, deploy.cli.processes; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_scheduler_loads_no_torch() -> None:
    check = "import sys, worker.scheduler.scheduler; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
