"""Nothing is decided by a clock that somebody can set: wall-clock time is only told, never reckoned with."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.server import ROOT

TELLS = {  # where wall-clock time may be asked for, and what for
    "frontend/observability/access_log.py": "the stamp of a line",
    "frontend/api/app.py": "`created` of models",
    "frontend/api/common.py": "`created` of answers",
    "frontend/api/openai/responses.py": "`completed_at`",
    "frontend/text/chat_template.py": "a template's strftime_now",
    "frontend/observability/tracing.py": "the stamps of spans",
    "deploy/cli/process_commands.py": "the epoch of a worker that nobody numbers: only has to differ",
}
WALL = {"time.time", "time.time_ns", "time.localtime", "time.gmtime"}
WALL |= {"datetime.now", "datetime.utcnow", "datetime.today"}


def asks(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            name = ".".join(ast.unparse(node).rsplit(".", 2)[-2:])
            if name in WALL:
                yield name
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if f"time.{alias.name}" in WALL)


def test_wall_clock_time_is_asked_for_only_to_be_told() -> None:
    files = [file for room in ("frontend", "worker", "shared", "deploy") for file in (ROOT / room).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if any(asks(file))}
    assert found == set(TELLS)
