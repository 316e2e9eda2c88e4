"""Fetches models of the table from the hub when they are first requested. The size of a model is unknown until then.
Each model is fetched by a process `sluice fetch`, which ends with the launcher.
"""

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path

from deploy.supervisor.child_command import DEMO, child_environment
from deploy.supervisor.packaged_model import SMOLLM2
from shared.gguf.naming import HUB_NAME

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MOST_REASON_CHARS = 1000


class FetchFailed(Exception):
    """A model could not be fetched; the message says why."""


class HubModels:
    """Finds the models of the table on this machine, and fetches missing ones."""

    def __init__(self, revision: str) -> None:
        """revision: the revision of every fetched model; empty: the head of its main branch"""
        self._revision = revision
        self._folders: dict[str, str] = {}

    def path(self, model: str) -> str:
        """Returns the path of a model: its folder if it was fetched from the hub, else `model` itself."""
        return self._folders.get(model, model)

    def is_away(self, model: str) -> bool:
        """Whether the model must be fetched before its size is known."""
        if model in (DEMO, SMOLLM2.name) or model in self._folders:
            return False
        named = HUB_ID.fullmatch(model) or HUB_NAME.fullmatch(model)
        return bool(named) and not Path(model).expanduser().exists()

    async def fetch(self, model: str) -> None:
        """Downloads the files of a model that the hub's cache lacks. Raises FetchFailed."""
        command = [
            sys.executable, "-P", "-m", "deploy.cli.main", "fetch", f"--model={model}", f"--revision={self._revision}",
            f"--parent={os.getpid()}",
        ]  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=child_environment()
            )
        except OSError as error:
            raise FetchFailed(f"`sluice fetch` did not start: {error.strerror}") from error
        try:
            out, said = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines() or ["`sluice fetch` ended without a word"]
            raise FetchFailed(lines[-1].removeprefix("sluice fetch: ")[:MOST_REASON_CHARS])
        first = out.decode().partition("\n")[0]
        self._folders[model] = first.partition(" is in ")[2]
