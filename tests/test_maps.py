"""Maps for readers: the `__init__` of a folder names every file in it, and docs/architecture.md names real files."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = (
    "frontend", "frontend/api", "frontend/api/anthropic", "frontend/api/chat", "frontend/api/llama_cpp",
    "frontend/api/ollama", "frontend/api/openai", "frontend/api/pooling", "frontend/api/receipts",
    "frontend/api/requests", "frontend/api/routes", "frontend/api/sglang", "frontend/generation",
    "frontend/observability", "frontend/offline", "frontend/output_parser", "frontend/output_parser/calls",
    "frontend/output_parser/grammar", "frontend/server", "frontend/text", "frontend/workers", "shared",
    "shared/config", "shared/gguf",
    "shared/gguf/config", "shared/gguf/text", "shared/logs", "shared/messages", "shared/pictures", "shared/processes",
    "shared/wire",
    "worker", "worker/engine", "worker/grammar", "worker/kernels", "worker/kernels/cpu",
    "worker/kernels/cpu/recurrent", "worker/kernels/gpu", "worker/kernels/gpu/attention",
    "worker/kernels/gpu/experts", "worker/kernels/gpu/launch", "worker/kernels/gpu/products",
    "worker/kernels/gpu/recurrent", "worker/kernels/gpu/rowwise", "worker/kernels/gpu/sampling",
    "worker/kernels/recurrent", "worker/kernels/rowwise", "worker/kernels/weights", "worker/kv_cache",
    "worker/model", "worker/model/checkpoint", "worker/model/families", "worker/model/feed_forward",
    "worker/model/gguf", "worker/model/inputs", "worker/model/mixers", "worker/model/quantization",
    "worker/model/weights_cache", "worker/observability", "worker/run", "worker/run/checks", "worker/run/graphs",
    "worker/schedule", "worker/schedule/features", "worker/schedule/records", "worker/transport", "worker/vision",
    "deploy",
    "deploy/cli", "deploy/demo", "deploy/demo/training", "deploy/reference", "deploy/release", "deploy/replay",
    "deploy/supervisor", "bench", "bench/client", "bench/gpu", "bench/gpu/checks", "bench/gpu/first_hour",
    "bench/gpu/measure", "bench/gpu/offline", "bench/gpu/setup", "bench/micro", "bench/peers", "bench/real",
    "bench/simulate", "bench/workloads",
)  # fmt: skip
MOST_FILES = 16  # including `__init__`
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


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    """Only Python files are counted."""
    folders = {path.parent for top in MAPPED for path in (ROOT / top).rglob("*.py")}
    sizes = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > MOST_FILES} == {}
