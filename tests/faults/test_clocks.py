"""No decision depends on the wall clock, because it can be set: it is only reported, never used to measure time."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.server import ROOT

ALLOWED = {  # module that may read the wall clock → the reason
    "frontend/observability/access_log.py": "the stamp of a line",
    "shared/log.py": "the stamp of a line",
    "frontend/observability/recording.py": "the stamp of a line",
    "frontend/app_state.py": "`created` of models",
    "frontend/api/answer.py": "`created` of answers",
    "frontend/routes/generate.py": "`created` of answers, and the date in their prompts",
    "frontend/api/ollama/models.py": "`expires_at` of models that are always loaded",
    "deploy/launcher/many_manager.py": "`expires_at` of models",
    "frontend/api/ollama/chat.py": "`created_at` of an answer that needs no generation",
    "frontend/api/openai/responses.py": "`completed_at`",
    "frontend/text/chat_template.py": "a template's strftime_now",
    "worker/lora/store.py": "the value of the gauge that gateways read",
    "worker/engine/kv_events.py": "the stamp of a batch",
    "frontend/observability/tracing.py": "the stamps of spans",
    "frontend/kept/answers.py": "ages of kept answers and of their owners, which other processes and later starts read",
    "frontend/kept/conversations.py": "ages of conversations, which later starts read",
    "frontend/kept/run.py": "when a kept answer ended",
    "frontend/kept/store.py": "ages in the store, which later starts read",
    "frontend/kept/sqlite.py": "the clock by which the processes with one file say that they live",
    "frontend/routes/blobs.py": "ages of uploads, which later starts read",
    "frontend/routes/kept.py": "`created` of answers, and the date in their prompts",
    "frontend/routes/responses_socket.py": "`completed_at` of a response that only computes a prompt in advance",
    "frontend/kept/files.py": "ages of files, which later starts read",
    "frontend/kept/batches.py": "leases of lines, which other processes read; an outcome is written once all the same",
    "frontend/kept/batch_runner.py": "ages of batches, which other processes and later starts read",
    "frontend/routes/batches.py": "`created_at` of batches, and their ages",
    "frontend/routes/files.py": "`created_at` of files, and their ages",
    "worker/kv_cache/store.py": "until when a file counts as used, which other processes and hosts read",
    "worker/kv_cache/store_file.py": "when a file was used last",
    "worker/kv_cache/store_tier.py": "when a file was used last",
    "deploy/launcher/many_library.py": "`modified_at` of names",
    "deploy/cli/kv_cache.py": "for how long a file counts as used",
    "deploy/cli/stored_models.py": "how long ago a model was used",
    "deploy/launcher/packaged_model.py": "when a file was used last",
    "shared/hf_hub.py": "when a file was used last",
    "deploy/cli/processes.py": "the epoch of a worker without a launcher, which only has to differ",
}
WALL_CLOCK = {"time.time", "time.time_ns", "time.localtime", "time.gmtime"}
WALL_CLOCK |= {"datetime.now", "datetime.utcnow", "datetime.today"}


def wall_clock_calls(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            name = ".".join(ast.unparse(node).rsplit(".", 2)[-2:])
            if name in WALL_CLOCK:
                yield name
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (alias.name for alias in node.names if f"time.{alias.name}" in WALL_CLOCK)


def test_wall_clock_is_read_only_where_it_is_reported() -> None:
    files = [file for folder in ("frontend", "worker", "shared", "deploy") for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)) for file in files if any(wall_clock_calls(file))}
    assert found == set(ALLOWED)
