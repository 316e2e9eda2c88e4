"""How each kind of process is started: command, settings, environment; and where the model they share lies."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.config import Settings, with_values
from shared.flags import Flag, all_flags, select, to_argv, without_settings
from shared.hf_hub import HubError, fetch

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"

SERVE_FLAGS = all_flags()
WORKER_FLAGS = select(("model", "wire", "worker"), ("metrics_prefix", "log_level"))
FRONTEND_FLAGS = select(("model", "wire", "frontend"), ("drain_timeout",))

_TEXT_FILES = ["*.json", "*.jinja"]  # what a frontend needs of a checkpoint


class CliError(Exception):
    """One sentence for the person at the terminal, and the exit code it ends the command with."""

    def __init__(self, message: object, code: int) -> None:
        super().__init__(str(message))
        self.code = code


def command(role: str, settings: Settings, flags: Sequence[Flag]) -> list[str]:
    """Starts a child of this process, which ends with it."""
    return [sys.executable, "-P", "-m", "deploy.cli.main", role, f"--parent={os.getpid()}", *to_argv(settings, flags)]


def environment() -> dict[str, str]:
    """Ours, without the settings: they travel as flags, so that a child cannot read them differently."""
    home = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (home, os.environ.get("PYTHONPATH")) if path)
    return without_settings(os.environ) | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def with_local_model(settings: Settings) -> Settings:
    """Settings whose `model` is a folder where it can be one now; clients still use the name that was asked for."""
    return with_values(settings, {"model": _place(settings.model.model), "served_model_name": settings.model.name})


def with_tokenizer_files(settings: Settings) -> Settings:
    """The same with a folder of at least the tokenizer's files, fetched from the hub unless they are here."""
    if Path(settings.model.model).is_dir():
        return settings
    try:
        folder = fetch(settings.model.model, _TEXT_FILES, revision=settings.model.revision)
    except HubError as error:
        raise CliError(f"--model: {error}", 3) from error
    return with_values(settings, {"model": str(folder)})


def _place(model: str) -> str:
    """The demo's folder for `demo`, the folder of that name if there is one, else the text itself: a hub id."""
    if model == "demo":
        if not (DEMO_MODEL / "config.json").is_file():
            raise CliError(f"the embedded demo model is missing from {DEMO_MODEL}", 3)
        return str(DEMO_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    if path.exists():
        raise CliError(
            f"--model {model}: it is a file; a folder with config.json, safetensors and tokenizer.json is needed", 3
        )
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CliError(f"--model {model}: there is no such folder", 3)
    return model
