"""Checks that other users can neither read a file of secrets nor write to the cache, whose files are trusted.

Knows owners and modes; reads no file.
"""

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def is_open_to_others(path: Path | str) -> bool:
    """Returns whether a file of secrets may be read by more users than it should. Raises OSError.

    Only the owner may read a file of this user (ssh has the same rule). Another user's file, such as a mounted secret,
    must not be readable by everyone.
    """
    info = os.stat(path)
    return bool(stat.S_IMODE(info.st_mode) & (0o077 if info.st_uid == os.geteuid() else 0o007))


def cache_folder() -> Path:
    """Returns Sluice's folder in the user's cache, for files that can be made again. The folder may not exist yet.

    For a user without a home, the folder lies among the temporary files.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "sluice"
    try:
        return Path.home() / ".cache" / "sluice"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"sluice-{os.geteuid()}"


def private_cache() -> Path:
    """Returns the cache folder, made with mode 0700 if needed. It must be private: processes run its compiled code.

    Raises OSError if the folder cannot be made, if another user owns the folder or the link to it, or if other users
    can write to it.
    """
    return private_folder(cache_folder())


def private_folder(folder: Path) -> Path:
    """Returns the folder, made with mode 0700 if needed. Raises OSError as `private_cache` does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (is_trusted(folder) and _is_closed(folder)):
        raise PermissionError(errno.EPERM, "other users can write to it", str(folder))
    return folder


def is_trusted(path: Path) -> bool:
    """Returns whether this user or root owns the path, and the link if the path is a link. Raises OSError."""
    return all(info.st_uid in (os.geteuid(), 0) for info in (path.lstat(), path.stat()))


def _is_closed(folder: Path) -> bool:
    """Removes other users' permissions on a folder of this user. Returns whether only the owner can write to it."""
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        with suppress(OSError):  # root owns the folder, or its file system has no permissions
            folder.chmod(0o700)
    return not stat.S_IMODE(folder.stat().st_mode) & 0o022
