"""`sluice cache`: lists the prefixes in a folder of --kv-store, pins them, and copies them to other servers.

A prefix is named by the first digits of the digest of its tokens. Works on files alone, beside running servers.
"""

import math
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from deploy.cli.stored_models import ago, size_text
from deploy.launcher.child_command import CliError
from shared.config.declaration import ConfigError
from shared.config.flags import Parser
from worker.kv_cache.store_file import TEMPORARY, Disk, Head, Unusable, packed_head
from worker.kv_cache.store_tier import PAGES, PINNED, STATE, TOKEN, Tier, check_folder

DIGITS = 12


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of the store. used: the time of its last use, in seconds since 1970"""

    path: Path
    head: Head
    nbytes: int
    used: float

    @property
    def pin(self) -> Path:
        return self.path.with_name(self.path.name + PINNED)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that no longer one continues. files: from its end to its beginning; whole: whether none is missing"""

    name: str
    files: tuple[Stored, ...]
    whole: bool

    @property
    def row(self) -> tuple[str, ...]:
        end = self.files[0]
        kept = "" if self.whole else "beginning is missing"
        if (minutes := math.ceil((end.used - time.time()) / 60)) > 0:
            kept = f"kept for {minutes} min"
        if all(one.pin.exists() for one in self.files):
            kept = "pinned"
        size = size_text(sum(one.nbytes for one in self.files))
        used = ago(max(one.used for one in self.files))
        return self.name, str(end.head.tokens), size, used, end.head.fingerprint, kept


def parser() -> Parser:
    parser = Parser(
        prog="sluice cache",
        usage="sluice cache {list,pin,unpin,export,import} DIR [NAME] [FILE]",
        description="Work on a folder of --kv-store. list: its prefixes, with tokens, size, last use and the "
        "fingerprint of the model. pin, unpin NAME: keep a prefix whatever is used less recently, or no longer. "
        "export NAME FILE: write a prefix to one file. import FILE: add it to another folder, for servers of the "
        "same model.",
    )
    parser.add_argument("action", choices=tuple(ACTIONS))
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("words", metavar="NAME FILE", nargs="*")
    return parser


def cache(words: list[str]) -> int:
    """Does what the words say, and returns the exit code. Raises CliError."""
    args = parser().read(words)
    act, names = ACTIONS[args.action]
    if len(args.words) != len(names):
        raise CliError(f"sluice cache {args.action} DIR {' '.join(names)}".rstrip() + ": these words are needed", 2)
    folder = Path(args.folder).expanduser()
    try:
        if args.action != "import":  # which makes the folder when it has read its file
            if not (folder / TOKEN).is_file():
                raise CliError(f"{folder} is no folder of --kv-store: it has no {TOKEN}", 2)
            check_folder(folder)
        act(folder, *args.words)
    except ConfigError as error:
        raise CliError(error, 2) from error
    except OSError as error:
        raise CliError(f"{error.filename or folder}: {error.strerror or error}", 1) from error
    return 0


def prefixes(folder: Path) -> list[Prefix]:
    """Returns the prefixes of a folder, the last used first."""
    tier, found = _tier(folder), dict[tuple[bytes, bytes, bytes], Stored]()
    for path, nbytes, used in tier_files(folder):
        with suppress(Unusable, FileNotFoundError):
            head = Disk().read_head(path)
            kind = STATE if head.state else PAGES
            if path == tier.path(head.digest, kind):  # else it is from before a reset
                found[head.space, head.digest, kind] = Stored(path, head, nbytes, used)
    continued = {(space, one.head.parent) for (space, *_), one in found.items() if one.head.pages}
    ends = [one for (space, digest, _), one in found.items() if (space, digest) not in continued]
    whole_runs = {(one.head.space, one.head.digest) for one in ends if one.head.state}
    ends = [one for one in ends if one.head.state or (one.head.space, one.head.digest) not in whole_runs]
    return sorted((_prefix(end, found) for end in ends), key=lambda one: (-one.files[0].used, one.name))


def tier_files(folder: Path) -> list[tuple[Path, int, float]]:
    return [one for one in Disk().files(folder) if not one[0].name.endswith((PINNED, TEMPORARY))]


def _prefix(end: Stored, found: dict[tuple[bytes, bytes, bytes], Stored]) -> Prefix:
    files, last = [end], end.head
    while last.parent:
        before = found.get((last.space, last.parent, PAGES))
        if before is None:
            break
        files.append(before)
        last = before.head
    return Prefix(end.head.digest.hex()[:DIGITS], tuple(files), not last.parent)


def _tier(folder: Path) -> Tier:
    tier = Tier(folder, 0, b"", Disk())
    if not tier.refresh():
        raise CliError(f"{folder}: its {TOKEN} cannot be read or made", 1)
    return tier


def _named(folder: Path, name: str) -> Prefix:
    found = [one for one in prefixes(folder) if one.name.startswith(name.lower())]
    if len(found) != 1:
        raise CliError(f"{name} names {len(found)} prefixes of {folder}; see sluice cache list {folder}", 2)
    return found[0]


def _list(folder: Path) -> None:
    found = prefixes(folder)
    if not found:
        print(f"{folder} has no prefixes")
        return
    rows = [("NAME", "TOKENS", "SIZE", "LAST USE", "MODEL", ""), *(one.row for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    for row in rows:
        print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    total = sum(nbytes for _, nbytes, _ in tier_files(folder))
    print(f"\n{size_text(total)} in all; prefixes with a common beginning share its files")


def _pin(folder: Path, name: str) -> None:
    for one in _named(folder, name).files:
        os.close(os.open(one.pin, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


def _unpin(folder: Path, name: str) -> None:
    for one in _named(folder, name).files:
        one.pin.unlink(missing_ok=True)


def _export(folder: Path, name: str, file: str) -> None:
    prefix = _named(folder, name)
    if not prefix.whole:
        raise CliError(f"{name}: a file of its beginning is missing, so that no server could use it", 1)
    target = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        with open(target, "wb") as out, tarfile.open(fileobj=out, mode="w") as archive:
            for number, one in enumerate(reversed(prefix.files)):
                data = _whole(one)
                member = tarfile.TarInfo(f"{number:06}")
                member.size, member.mode = len(data), 0o600
                archive.addfile(member, BytesIO(data))
    except BaseException:
        os.unlink(file)
        raise
    print(f"{prefix.files[0].head.tokens} tokens of {prefix.files[0].head.fingerprint} are in {file}")


def _whole(one: Stored) -> bytes:
    """Returns all bytes of a file, after they were checked. Raises CliError."""
    try:
        head, payload = Disk().read(one.path, one.head.space, one.head.digest)
    except Unusable as problem:
        raise CliError(f"{one.path} is {problem}, so that no server could use it", 1) from None
    return packed_head(head) + payload.tobytes()


def _import(folder: Path, file: str) -> None:
    tokens = max([head.tokens for head, _ in _exported(file)], default=0)  # all are good, or none is added
    if not tokens:
        raise CliError(f"{file} was not written by sluice cache export: it is empty", 1)
    check_folder(folder)
    tier = _tier(folder)
    for head, data in _exported(file):
        Disk().write(tier.path(head.digest, STATE if head.state else PAGES), (data,))
    print(f"{tokens} tokens were added to {folder}")


def _exported(file: str) -> Iterator[tuple[Head, bytes]]:
    """Yields each file of an export with its header, after it was checked. Raises CliError."""
    try:
        with tarfile.open(file, "r:") as archive, tempfile.TemporaryDirectory() as scratch:
            for member in archive:
                stored = archive.extractfile(member)
                if stored is None:
                    raise CliError(f"{file} was not written by sluice cache export", 1)
                path, data = Path(scratch) / "file", stored.read()
                path.write_bytes(data)
                head = Disk().read_head(path)
                Disk().read(path, head.space, head.digest)
                yield head, data
    except (tarfile.TarError, Unusable) as error:
        raise CliError(f"{file} was not written by sluice cache export, or is damaged: {error}", 1) from error


ACTIONS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "list": (_list, ()),
    "pin": (_pin, ("NAME",)),
    "unpin": (_unpin, ("NAME",)),
    "export": (_export, ("NAME", "FILE")),
    "import": (_import, ("FILE",)),
}
