"""Maps for readers: the `__init__` of a folder names every file in it, and docs/architecture.md names real files."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = (
    "frontend", "frontend/api", "frontend/api/anthropic", "frontend/api/ollama", "frontend/api/openai",
    "frontend/api/pooling", "frontend/api/receipts", "frontend/generation", "frontend/observability",
    "frontend/offline", "frontend/output_parser", "frontend/server", "frontend/text", "frontend/workers", "shared",
    "shared/config", "shared/gguf", "shared/messages", "worker", "worker/engine", "worker/grammar",
    "worker/kernels", "worker/kernels/cpu", "worker/kernels/gpu", "worker/kv_cache", "worker/model",
    "worker/model/gguf", "worker/model/quantization", "worker/observability", "worker/run", "worker/schedule",
    "worker/transport", "deploy", "deploy/cli", "deploy/supervisor", "deploy/reference", "deploy/release",
    "deploy/replay", "deploy/demo", "deploy/demo/training", "bench", "bench/client", "bench/gpu",
    "bench/gpu/checks", "bench/gpu/first_hour", "bench/gpu/measure", "bench/gpu/offline", "bench/gpu/setup",
    "bench/micro", "bench/peers", "bench/simulate", "bench/workloads",
)  # fmt: skip
PAGE = (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("folder", MAPPED)
def test_folder_map_names_every_file(folder: str) -> None:
    folder_map = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    names = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", folder_map)) == []


def test_head_of_the_page_names_every_script() -> None:
    scripts = ROOT / "frontend" / "web"
    head = (scripts / "main.js").read_text().split("\nimport ")[0]
    names = {path.stem for path in scripts.glob("*.js")} - {"main"}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", head)) == []


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE))))
def test_architecture_page_names_existing_files(named: str) -> None:
    assert any(path.as_posix().endswith(f"/{named}") for path in ROOT.glob(f"*/**/{Path(named).name}"))
