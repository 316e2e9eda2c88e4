"""Imports go only downward: the folders that each folder may import, checked in the sources and in a frontend."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
OURS = {"frontend", "worker", "shared", "deploy", "bench", "tests"}
TENSORS = {"torch", "numpy", "triton", "transformers", "safetensors"}
HTTP = {"starlette", "uvicorn", "sse_starlette", "httptools", "uvloop", "fastapi"}

# path under the root → top-level modules that it may not import
FORBIDDEN = {
    "frontend": {"worker", "deploy", "bench", "tests", "gguf", *TENSORS},
    "worker": {"frontend", "deploy", "bench", "tests", "tokenizers", "gguf", *HTTP},
    "shared": {"frontend", "worker", "deploy", "bench", "tests", *TENSORS, *HTTP},
    "deploy": {"tests", "bench", "gguf"},
    "bench": {"tests"},
    "worker/scheduler": TENSORS,
    "worker/kv_cache/pages.py": TENSORS,
    "worker/kv_cache/prefix_cache.py": TENSORS,
    "worker/kv_cache/window.py": TENSORS,
    "worker/kv_cache/window.py": TENSORS,
    "worker/ops": OURS - {"worker"},
}

# what a format of weights, or a kind of mixer or feed-forward network, may import: never another format or kind
STORED = (
    "worker.checkpoint.checkpoint", "worker.spec", "worker.checkpoint.stored_weight",
    "worker.ops", "shared",
)  # fmt: skip
LAYER_PARTS = (
    *STORED, "worker.models.config_values", "worker.models.layer_kinds", "worker.models.layer_kinds",
    "worker.checkpoint.stored_weight",
)  # fmt: skip

# path under the root → the only modules of ours (by prefix) that it may import
ALLOWED = {
    "worker/ops": ("worker.ops", "shared.private_files"),
    "worker/scheduler": (
        "worker.scheduler",
        "worker.kv_cache.pages",
        "worker.kv_cache.prefix_cache",
        "worker.kv_cache.window",
        "worker.kv_cache.window",
        "shared",
    ),
    "worker/kv_cache": (
        "worker.kv_cache",
        "worker.spec",
        "worker.ops.paged_kv",
        "worker.ops.recurrent_state",
        "shared",
    ),
    "worker/models": ("worker.models", "worker.spec", "worker.ops", "worker.kv_cache", "shared"),
    "worker/spec.py": ("worker.ops.activation.reference", "worker.ops.recurrent_state"),
    "worker/quantization": ("worker.quantization", *STORED),
    "worker/quantization": (
        "worker.quantization",
        "worker.checkpoint.checkpoint",
        "worker.checkpoint.staging",
        *STORED,
    ),
    "worker/models": ("worker.models", *LAYER_PARTS),
    "worker/models": ("worker.models", "worker.models.family", *LAYER_PARTS),
    "shared": ("shared",),
}

# (file, folder that it may import) → the reason
EXCEPTIONS = {
    ("deploy/offline/llm.py", "deploy"): "starts a worker process in the same way as the command line",
    ("worker/ops/native_build.py", "shared"): "asks whether others can write to the cache of compiled libraries",
}


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    """Returns the full names of all modules that a file imports, at any place; relative imports are made absolute."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations_of(path: Path, modules: set[str]) -> list[str]:
    name = path.relative_to(ROOT).as_posix()
    found = {module.split(".")[0] for module in imports(path)} & modules
    return [f"{name} imports {top}" for top in sorted(found) if (name, top) not in EXCEPTIONS]


@pytest.mark.parametrize("place", FORBIDDEN)
def test_folder_imports_nothing_above_it(place: str) -> None:
    assert sources(place), "the folder has moved: change the rule, too"
    assert [line for path in sources(place) for line in violations_of(path, FORBIDDEN[place])] == []


@pytest.mark.parametrize("place", ALLOWED)
def test_low_folder_imports_only_allowed_folders(place: str) -> None:
    violations = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(place)
        for module in imports(path)
        if module.split(".")[0] in OURS and not f"{module}.".startswith(tuple(f"{own}." for own in ALLOWED[place]))
    ]
    assert violations == []


def test_imports_finds_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "frontend").mkdir()
    path = tmp_path / "frontend" / "bad.py"
    path.write_text(
        "import torch.nn as nn\n"
        "def late():\n"
        "    from worker import loop\n"
        "    from . import text\n"
        "    from .a import b\n"
    )
    assert list(imports(path)) == ["torch.nn", "worker.loop", "frontend.text", "frontend.a.b"]
    assert violations_of(path, {"torch", "worker"}) == [
        "frontend/bad.py imports torch",
        "frontend/bad.py imports worker",
    ]


def test_frontend_loads_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "numpy", "gguf", "worker"}
    check = f"import sys, frontend.app, deploy.cli.processes; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_scheduler_loads_no_torch() -> None:
    check = "import sys, worker.scheduler.scheduler; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


# The accepted circles among folders, each with its reason: the folders of a circle can only be read together.
CIRCLES = {
    ("worker/ops/moe/packed.py", "worker/ops/moe"): (
        "the record of a layer's experts keeps their weights in the order in which the Triton kernels read them"
    ),
    ("worker/scheduler", "worker/scheduler/sequence.py"): "a record names the sequence in its types",
}


@cache
def node_of(path: Path) -> str:
    """Returns the node of a file in the search for circles: its folder, or the file itself if folders lie beside it.

    Such files are nodes of their own because some are shared by the folders beside them, and others use these folders.
    """
    folder = path.parent
    has_folders = any((inner / "__init__.py").exists() for inner in folder.iterdir())
    return (path if has_folders else folder).relative_to(ROOT).as_posix()


@cache
def file_of(module: str) -> Path | None:
    """Returns the file of the module, or of the object in a module, that has this full name; None if it is not ours."""
    path = ROOT.joinpath(*module.split("."))
    if module.split(".")[0] not in OURS:
        return None
    files = (path.with_suffix(".py"), path / "__init__.py", path.parent.with_suffix(".py"), path.parent / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def folder_imports() -> dict[str, set[str]]:
    """Returns the folders that each folder imports, without the tests."""
    found: dict[str, set[str]] = {}
    for path in (path for top in sorted(OURS - {"tests"}) for path in sources(top)):
        imported = {node_of(file) for module in imports(path) if (file := file_of(module)) is not None}
        found.setdefault(node_of(path), set()).update(imported)
    return found


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
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


def test_folders_import_each_other_in_no_circle_but_those_listed() -> None:
    assert circles(folder_imports()) == set(CIRCLES), "a new circle, or one that is gone and leaves the list"


def test_circles_finds_groups_that_reach_each_other() -> None:
    graph = {"a": {"b"}, "b": {"c", "b"}, "c": {"a", "d"}, "d": {"e"}, "e": set(), "f": {"g"}, "g": {"f"}}
    assert circles(graph) == {("a", "b", "c"), ("f", "g")}
