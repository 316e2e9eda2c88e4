"""Downloads checkpoints from the Hugging Face hub into its local cache; every failure becomes one sentence.

Knows files, their sizes and hashes, not their contents. A large file (of Git LFS), whose SHA-256 the hub states, is
refused and deleted if its bytes have another. The download of a large file that was interrupted continues, also in
another process; huggingface_hub continues only within a process, so large files are downloaded here, to where it looks
for them.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]  # (bytes downloaded, bytes in total as far as known)

HTTP_LOGGERS = ("httpx", "httpx2")  # loggers that write a line for every HTTP request
SHA256 = re.compile(r"[0-9a-f]{64}")
CHECKPOINT_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "model*.safetensors"]  # of a model in safetensors
IGNORED_FILES = ["original/*", "onnx/*", "openvino/*", "gguf/*"]  # the same model in formats of other programs


PART = ".sluice.incomplete"  # suffix of incomplete files, which are in the folder of the complete ones
PIECE = 1 << 20  # bytes between two reports of progress
MOST_AT_A_TIME = 4  # large files
MOST_TRIES = 5  # connections in a row that deliver no bytes, after which a download fails
PAUSE_S = 1.0  # between two of them


class HubError(Exception):
    """A download failed; the message is one sentence that says what could not be fetched, why, and what to do."""


def fetch(
    model: str,
    files: Sequence[str],
    *,
    revision: str = "",
    prefer_cache: bool = False,
    ignored: Sequence[str] = IGNORED_FILES,
    on_progress: Progress = lambda done, total: None,
    verify: bool = True,
) -> Path:
    """Returns a local folder with the files of the hub id `model`; downloads what the cache lacks.

    files, ignored: patterns of file names.
    revision: branch, tag or commit; the main branch if empty.
    prefer_cache: use a complete cached copy without asking the hub for a newer one. Without a network the cache is
        used in any case.
    verify: check the hashes; without it, a later call for the same files does.
    Raises HubError.
    """
    from huggingface_hub import snapshot_download  # the import takes half a second; a local folder does not need it

    _log_no_requests()
    options: dict[str, Any] = {"revision": revision or None, "allow_patterns": files, "ignore_patterns": ignored}
    try:
        if prefer_cache:
            try:
                return _verified(model, Path(snapshot_download(model, local_files_only=True, **options)))
            except OSError:
                pass
        _fetch_large(model, files, ignored, revision, on_progress)
        folder = Path(snapshot_download(model, tqdm_class=_progress_bars(on_progress), **options))
        return _verified(model, folder) if verify else folder
    except HubError:
        raise
    except Exception as error:  # the HTTP library of huggingface_hub raises many types
        raise HubError(_describe(model, revision, error)) from error


def _verified(model: str, folder: Path) -> Path:
    """Returns a folder of the cache after a check of its files against the hashes that the hub stated.

    The cache names the bytes of a file after what the hub stated for it, and the files are links to them. A file that
    was checked gets a mark in the same folder, so that it is checked once. Its time of access becomes now.

    Raises HubError.
    """
    marks = folder.parents[1] / "sluice-verified"
    with suppress(OSError):
        marks.mkdir(exist_ok=True)
    for link in sorted(folder.rglob("*")):
        blob = link.resolve()
        if not (link.is_symlink() and SHA256.fullmatch(blob.name) and blob.is_file()):
            continue
        found, mark = blob.stat(), marks / blob.name
        with suppress(OSError):  # the time of access shows the last use, also on disks that do not note each reading
            os.utime(blob, ns=(time.time_ns(), found.st_mtime_ns))
        stamp = f"{found.st_size} {found.st_mtime_ns}"
        with suppress(OSError):
            if mark.read_text() == stamp:
                continue
        with blob.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != blob.name:
            link.unlink()
            blob.unlink()
            raise HubError(
                f"{link.relative_to(folder)} of {model!r} has the SHA-256 {sha256}, and the hub states {blob.name}: it "
                "was deleted; fetch it again"
            )
        with suppress(OSError):  # a cache that only others can write; its files are checked again next time
            mark.write_text(stamp)
    return folder


def file_names(model: str, *, revision: str = "", prefer_cache: bool = False) -> list[str]:
    """Returns the names of all files of the hub id `model`. If the hub cannot be reached: the cached files.

    prefer_cache: return the files of the cached copy if there is one.
    Raises HubError.
    """
    from huggingface_hub import HfApi, snapshot_download

    _log_no_requests()

    def cached() -> list[str]:
        none = {"allow_patterns": [""]}  # matches no file, so an incomplete cached copy is found, too
        folder = Path(snapshot_download(model, revision=revision or None, local_files_only=True, **none))
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    if prefer_cache:
        with suppress(OSError):
            return cached()
    try:
        return list(HfApi().list_repo_files(model, revision=revision or None))
    except Exception as error:  # the HTTP library of huggingface_hub raises many types
        if _answered(error):
            raise HubError(_describe(model, revision, error)) from error
        try:
            return cached()
        except Exception as missing:
            raise HubError(_describe(model, revision, missing)) from error


def file_sizes(model: str, *, revision: str = "") -> dict[str, int]:
    """Returns the sizes in bytes of all files of the hub id `model`, as the hub states them. Raises HubError."""
    from huggingface_hub import HfApi

    _log_no_requests()
    try:
        listed = HfApi().list_repo_tree(model, recursive=True, revision=revision or None)
        return {entry.path: int(entry.size) for entry in listed if getattr(entry, "size", None) is not None}
    except Exception as error:  # the HTTP library of huggingface_hub raises many types
        raise HubError(_describe(model, revision, error)) from error


def file_digests(model: str, *, revision: str = "") -> dict[str, str]:
    """Returns the SHA-256 (hexadecimal) of the files of the hub id `model` for which the hub states it: the large ones.

    Raises HubError.
    """
    from huggingface_hub import HfApi

    _log_no_requests()
    try:
        listed = HfApi().list_repo_tree(model, recursive=True, revision=revision or None)
        return {entry.path: lfs.sha256 for entry in listed if (lfs := getattr(entry, "lfs", None)) is not None}
    except Exception as error:  # the HTTP library of huggingface_hub raises many types
        raise HubError(_describe(model, revision, error)) from error


def fetched_bytes(model: str, files: Mapping[str, int], *, revision: str = "") -> int:
    """Returns how many bytes of these files need not be fetched, because the cache has them, or a beginning of them.

    files: names and sizes, as `file_sizes` has them.
    """
    folder = _blobs(model)
    whole = sum(size for name, size in files.items() if cached_file(model, name, revision=revision) is not None)
    parts = sum(part.stat().st_blocks * 512 for part in folder.glob(f"*{PART}")) if folder.is_dir() else 0
    return min(whole + parts, sum(files.values()))


def fetch_beginning(model: str, file: str, nbytes: int, folder: Path, *, revision: str = "") -> Path:
    """Returns a file in `folder` that is as long as `file` of the hub id `model`, but holds only the first bytes of it.

    The other bytes are zeros, which take no space on the disk. Each version is fetched once. Raises HubError.
    """
    from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    _log_no_requests()
    try:
        url = hf_hub_url(model, file, revision=revision or None)
        found = get_hf_file_metadata(url)
        version = re.sub(r"[^\w.-]", "_", str(found.etag))  # the etag becomes part of a file name
        target = folder / f"{version}-{Path(file).name}"
        if target.exists():
            return target
        headers = build_hf_headers() | {"Range": f"bytes=0-{nbytes - 1}"}
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            data = _first_bytes(response.iter_bytes(), nbytes)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            part.write(data)
            part.truncate(found.size)
        return Path(part.name).rename(target)
    except Exception as error:  # the HTTP library of huggingface_hub raises many types
        raise HubError(_describe(model, revision, error)) from error


def cached_file(model: str, file: str, *, revision: str = "") -> Path | None:
    """Returns a file of the hub id `model` if it is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, file, revision=revision or None)
    return Path(found) if isinstance(found, str) else None


def _blobs(model: str) -> Path:
    """Returns the folder of the local cache that has the bytes of the files of the hub id `model`."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "blobs"


def _fetch_large(
    model: str, files: Sequence[str], ignored: Sequence[str], revision: str, on_progress: Progress
) -> None:
    """Downloads the large files that match `files` and not `ignored`, as far as the cache lacks them.

    If the hub cannot be reached or refuses, does nothing, so that the caller's way to the files reports this.
    """
    from huggingface_hub import HfApi

    try:
        listed = list(HfApi().list_repo_tree(model, recursive=True, revision=revision or None))
    except Exception:  # the HTTP library of huggingface_hub raises many types
        return
    sums = {one.path: (str(lfs.sha256), int(lfs.size)) for one in listed if (lfs := getattr(one, "lfs", None))}
    folder = _blobs(model)
    missing = {
        name: size
        for name, (sha256, size) in sums.items()
        if any(fnmatch(name, pattern) for pattern in files)
        and not any(fnmatch(name, pattern) for pattern in ignored)
        and SHA256.fullmatch(sha256)
        and not (folder / sha256).exists()
    }
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    total, done, lock = sum(missing.values()), dict.fromkeys(missing, 0), threading.Lock()

    def fetch_one(name: str) -> None:
        def progress(nbytes: int) -> None:
            with lock:
                done[name] = nbytes
                on_progress(sum(done.values()), total)

        _fetch_blob(model, name, revision, folder / sums[name][0], sums[name][1], progress)

    with ThreadPoolExecutor(min(MOST_AT_A_TIME, len(missing))) as threads:
        list(threads.map(fetch_one, missing))


def _fetch_blob(
    model: str, name: str, revision: str, blob: Path, size: int, on_progress: Callable[[int], None]
) -> None:
    """Downloads what is missing of one file, and gives it the name `blob`. Waits while another process does the same.

    on_progress: is called with how many bytes are here
    """
    from huggingface_hub import errors, hf_hub_url

    url = hf_hub_url(model, name, revision=revision or None)
    with open(blob.with_name(blob.name + PART), "ab") as part:
        fcntl.flock(part, fcntl.LOCK_EX)
        if blob.exists():
            return
        if (begun := part.tell()) > size:
            part.truncate(begun := 0)
        tries = 0
        while begun < size:
            on_progress(begun)
            before = begun
            try:
                for piece, at in _pieces(url, begun):
                    if at < begun:  # the server sends the whole file again
                        part.truncate(at)
                    part.write(piece)
                    begun = at + len(piece)
                    on_progress(min(begun, size))
            except (OSError, errors.HfHubHTTPError):
                raise
            except Exception:  # the connection broke
                part.flush()
                tries = 1 if begun > before else tries + 1
                if tries >= MOST_TRIES:
                    raise
                time.sleep(PAUSE_S)
            else:
                break
        part.flush()
        Path(part.name).rename(blob)


def _pieces(url: str, begin: int) -> Iterator[tuple[bytes, int]]:
    """Yields the bytes of a file from `begin` on, or from 0 if the server sends it whole; each piece with its place."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers() | ({"Range": f"bytes={begin}-"} if begin else {})
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        at = begin if response.status_code == 206 else 0
        for piece in response.iter_bytes(PIECE):
            yield piece, at
            at += len(piece)


def _first_bytes(pieces: Iterable[bytes], nbytes: int) -> bytes:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) >= nbytes:
            break
    return bytes(data[:nbytes])


def _log_no_requests() -> None:
    for name in HTTP_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _answered(error: Exception) -> bool:
    """Whether the hub itself answered with this error. Such an error is reported even if the cache holds a copy."""
    from huggingface_hub import errors

    return isinstance(error, errors.HfHubHTTPError) and error.response is not None and error.response.status_code < 500


def _progress_bars(on_progress: Progress) -> type:
    """Makes a tqdm class whose bars draw nothing; bars that count bytes call `on_progress`."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class SilentBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.bytes = options.get("unit") == "B"
            self.seen = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            self.seen += int(n or 0)
            if self.bytes and self.total:
                on_progress(self.seen, max(self.seen, int(self.total)))

    return SilentBar


def _describe(model: str, revision: str, error: Exception) -> str:
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
    if _is_full(error):
        return f"the disk is full: {model!r} is fetched only in part; `sluice models` lists what can go"
    return f"{model!r} could not be fetched from the hub: {_first_line(error)}"


def _is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that a disk or a user's share of it is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def _why(error: Exception) -> str:
    return f": {_first_line(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
