"""Makes the command lines and environments of child processes, and finds the folder of the model that they share."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.launcher.packaged_model import SMOLLM2, FetchError, fetched_showing
from shared.config.flags import Flag, all_flags, select, to_argv, without_settings
from shared.config.settings import Settings, with_values
from shared.gguf.naming import HUB_NAME, SUFFIX, GgufError, is_translation, local_model, short_name
from shared.gguf.translated import OFF, check_not_only_gguf, fetch_text, tower_file, translated
from shared.hf_hub import HubError, fetch
from shared.weight_formats import LAYOUT, format_of

DEMO = "demo"
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
SERVE_FLAGS = all_flags()
WORKER_FLAGS = select(("model", "wire", "worker"), ("metrics_prefix", "log_level", "log_format"))
FRONTEND_FLAGS = select(("model", "wire", "frontend"), ("drain_timeout", "models", "load_wait", "allow_pull"))
_TOKENIZER_FILES = ["*.json", "*.jinja"]  # the files of a checkpoint that a frontend needs


class CliError(Exception):
    """A one-sentence error message for the terminal, and the exit code of the command."""

    def __init__(self, message: object, code: int) -> None:
        super().__init__(str(message))
        self.code = code


def command_line(role: str, settings: Settings, flags: Sequence[Flag]) -> list[str]:
    """Returns the command line of a child that dies with this process; `role` is "worker" or "frontend"."""
    return [sys.executable, "-P", "-m", "deploy.cli.main", role, f"--parent={os.getpid()}", *to_argv(settings, flags)]


def child_environment() -> dict[str, str]:
    """Returns this process's environment without settings, so that a child takes all settings from its flags."""
    home = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(path for path in (home, os.environ.get("PYTHONPATH")) if path)
    return without_settings(os.environ) | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def with_local_model(settings: Settings) -> Settings:
    """Replaces the name of a local model by its folder. Clients may still use the name in --model, or its short
    form."""
    model = settings.model
    names = model.served_model_name or ",".join(dict.fromkeys((short_name(model.model), model.model)))
    folder = _model_folder(model.model, model.mmproj)
    return with_values(settings, {"model": folder, "served_model_name": names})


def with_default_model(settings: Settings) -> Settings:
    """Switches to the demo model, with a notice on stderr, if the default model cannot be fetched.

    Only for servers without --model.
    """
    try:
        fetched_showing(SMOLLM2, sys.stderr)
    except FetchError as error:
        print(
            f'sluice: serving the built-in toy "{DEMO}", because {error}. `sluice fetch {SMOLLM2.name}` tries again, '
            "and --model serves another",
            file=sys.stderr,
        )
        return with_values(settings, {"model": DEMO})
    return settings


def with_tokenizer_files(settings: Settings) -> Settings:
    """Replaces a hub id in `model` by a folder with at least the tokenizer's files. Raises CliError."""
    model, revision = settings.model.model, settings.model.revision
    if Path(model).is_dir():
        return settings
    try:
        if HUB_NAME.fullmatch(model):
            folder = fetch_text(model, revision, settings.model.mmproj)
        else:
            _check_no_tower(model, settings.model.mmproj)
            folder = fetch(model, _TOKENIZER_FILES, revision=revision)
            if not (folder / "tokenizer.json").exists():
                check_not_only_gguf(model, revision)
    except (GgufError, HubError) as error:
        raise CliError(f"--model: {error}", 3) from error
    return with_values(settings, {"model": str(folder)})


def _model_folder(model: str, mmproj: str) -> str:
    """Returns the folder of a built-in model or of a local checkpoint; a hub id is returned unchanged.

    A GGUF file is translated into a folder, which is returned. Raises CliError.
    """
    if model == DEMO:
        if not (DEMO_MODEL / "config.json").is_file():
            raise CliError(f"the embedded demo model is missing from {DEMO_MODEL}", 3)
        return str(DEMO_MODEL)
    path = Path(model).expanduser()
    try:
        if model == SMOLLM2.name:
            path = fetched_showing(SMOLLM2, sys.stderr)
        if (files := local_model(path)) is not None:
            return str(translated(files, tower=tower_file(files, mmproj)))
    except (FetchError, GgufError) as error:
        raise CliError(f"--model: {error}", 3) from error
    if path.is_dir():
        if not is_translation(path):
            _check_no_tower(model, mmproj)
        return str(path.resolve())
    if path.exists():
        found = f"is {kind}, not GGUF" if (kind := format_of(model)) else "is not GGUF"
        raise CliError(f"--model {model}: this file {found}: {LAYOUT}", 3)
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1 or path.suffix.lower() == SUFFIX
    if is_path and not HUB_NAME.fullmatch(model):
        raise CliError(f"--model {model}: there is no such file or folder", 3)
    return model


def _check_no_tower(model: str, mmproj: str) -> None:
    """Raises CliError if --mmproj names a vision encoder for a model that is not GGUF."""
    if mmproj not in ("", OFF):
        raise CliError(f"--mmproj {mmproj}: {model} is not a GGUF model, so its own files have its vision tower", 3)


# Kills a child process when its parent dies, whatever the cause.
#
# The child arranges this itself in its first action, so that no code has to run between fork and exec.

_PR_SET_PDEATHSIG = 1  # from prctl(2)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when `parent` dies. Outside Linux it only checks that `parent` still lives."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)
