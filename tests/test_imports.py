"""Imports go downward only: which folder may import which, checked in the sources and in a running frontend."""

import ast
import subprocess
import sys
from collections.abc import Iterator
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
    "worker/schedule": TENSORS,
    "worker/kv_cache/pages.py": TENSORS,
    "worker/kv_cache/prefix_cache.py": TENSORS,
    "worker/kv_cache/slots.py": TENSORS,
    "worker/kv_cache/window.py": TENSORS,
    "worker/kernels": OURS - {"worker"},
}

# path under the root → the only modules of ours (by prefix) that it may import
ALLOWED = {
    "worker/kernels": ("worker.kernels",),
    "worker/schedule": (
        "worker.schedule",
        "worker.kv_cache.pages",
        "worker.kv_cache.prefix_cache",
        "worker.kv_cache.slots",
        "worker.kv_cache.window",
        "shared",
    ),
    "worker/kv_cache": (
        "worker.kv_cache",
        "worker.model.spec",
        "worker.kernels.eight_bit_kv",
        "worker.kernels.recurrent_state",
        "shared",
    ),
    "worker/model": ("worker.model", "worker.kernels", "worker.kv_cache", "shared"),
    "shared": ("shared",),
}

# exceptions: a file and the folder it may import, with the reason
EXCEPTIONS = {
    ("frontend/offline/start.py", "deploy"): "starts a worker process in the same way as the command line",
}


def sources(place: str) -> list[Path]:
    path = ROOT / place
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, wherever in it; relative ones made absolute."""
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
    check = f"import sys, frontend.api.app, deploy.cli.process_commands; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_scheduler_loads_no_torch() -> None:
    check = "import sys, worker.schedule.scheduler; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
