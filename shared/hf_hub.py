"""Checkpoints from the Hugging Face hub: an id becomes a folder in the local cache, a failure a sentence.

Knows files and how many bytes of them are here; not what is in them. A download that was cut off goes on with the files
that are not whole.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]  # (bytes here, bytes in all, as far as is known)

CHATTY = ("httpx", "httpx2")  # a line for every request
ELSEWHERE = ["original/*", "onnx/*", "openvino/*", "gguf/*"]  # the same models in other programs' formats


class HubError(Exception):
    """One sentence: what could not be fetched, why, and what to do."""


def fetch(
    model: str,
    files: Sequence[str],
    *,
    revision: str = "",
    known: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> Path:
    """A folder with those files (patterns) of the hub id `model`, at a branch, tag or commit; downloaded unless cached.

    `known`: what the cache has is taken without asking whether there is a newer one, if it is whole. Without a network
    the cache is taken in any case. Raises HubError.
    """
    from huggingface_hub import snapshot_download  # half a second, and a folder does not need it

    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    where: dict[str, Any] = {"revision": revision or None, "allow_patterns": files, "ignore_patterns": ELSEWHERE}
    try:
        if known:
            try:
                return Path(snapshot_download(model, local_files_only=True, **where))
            except OSError:
                pass
        return Path(snapshot_download(model, tqdm_class=_bars(on_progress), **where))
    except Exception as error:  # whatever its HTTP library raises
        raise HubError(_sentence(model, revision, error)) from error


def _bars(on_progress: Progress) -> type:
    """A class of invisible progress bars; those that count bytes call `on_progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.bytes = options.get("unit") == "B"
            self.seen = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            if self.bytes and self.total:
                on_progress(self.seen, max(self.seen, int(self.total)))

    return Bars


def _sentence(model: str, revision: str, error: Exception) -> str:
    from huggingface_hub import errors

    token = "the token in HF_TOKEN" if os.environ.get("HF_TOKEN") else "a token in HF_TOKEN"
    match error:
        case errors.GatedRepoError():
            return (
                f"{model!r} is gated: accept its terms at https://huggingface.co/{model}, and serve it with {token} "
                "that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"{model!r} has no revision {revision!r} on the hub"
        case errors.RepositoryNotFoundError():
            return (
                f"{model!r} is not a folder here, and the hub has no such model, or it is private and needs {token} "
                "that may read it"
            )
        case errors.HfHubHTTPError(response=response) if response is not None and response.status_code in (401, 403):
            return f"the hub refuses to show {model!r} ({response.status_code}): it needs {token} that may read it"
        case errors.IncompleteSnapshotError():
            return f"{model!r} is in the local Hugging Face cache only in part, and the hub cannot be reached"
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled():
            offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
            return (
                f"{model!r} is not a folder here, is not in the local Hugging Face cache, and the hub cannot be "
                f"reached{offline}{_why(error)}"
            )
    return f"{model!r} could not be fetched from the hub: {_first_line(error)}"


def _why(error: Exception) -> str:
    return f": {_first_line(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
