"""All adapters of a server: those of --lora-modules, and those loaded or unloaded since the start.

All frontends of a server share its run folder. A file there lists the adapters that were loaded and unloaded, and the
default adapter. Every frontend reads the file again after a change. So as soon as one frontend has confirmed that an
adapter is loaded, all frontends know it. Without a run folder, a frontend keeps this list to itself.
"""

import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from frontend.errors import Overloaded
from frontend.turns import FairChildren
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.gguf.lora import read_gguf
from shared.lora import (
    MAX_WEIGHTS_BYTES,
    AdapterError,
    base_of,
    low_rank_modules,
    named_adapters,
    other_base,
    path_problem,
    read_files,
    size_of,
)
from shared.messages import Adapter
from shared.sandbox import Killed, Lost, NotStarted, Raised

log = logging.getLogger("sluice.frontend")
FILE, LOCK = "adapters.json", "adapters.lock"
MAX_LOADED = 1000  # limit on names that requests have loaded or unloaded
Changes = dict[str, Adapter | None]  # name → the loaded adapter; None: the adapter was unloaded


class Default(msgspec.Struct, frozen=True):
    """The name and scale of the adapter for requests that name none. If another
    adapter replaces this one under the same name, that adapter is the default."""

    name: str
    scale: float


class Changed(msgspec.Struct):
    """The changes that requests have made to the list of adapters since the server started."""

    adapters: Changes = {}
    default: Default | None = None


class NameTaken(Exception):
    """An adapter of this name exists already."""


class NoSuchAdapter(Exception):
    """No adapter of this name exists."""


class TooMany(Exception):
    """The registry has no room for another name."""


@dataclass
class AdapterRegistry:
    """All adapters of a server.

    model: the settings that name adapters; run_dir: the server's run folder; empty: none
    max_rank: the highest rank that adapters of --lora-modules may have; 0: only the workers check their ranks
    """

    model: ModelConfig
    run_dir: str = ""
    max_rank: int = 0

    def __post_init__(self) -> None:
        """Reads the adapters of --lora-modules. Raises ConfigError if one of them cannot be used."""
        self._given = {}
        for one in named_adapters(self.model):
            try:
                self._given[one.name], base = _describe(one.name, one.path, self.max_rank)
            except AdapterError as error:
                raise ConfigError(f"--lora-modules: the adapter {one.name!r}: {error}") from None
            if self.run_dir and (doubt := self.doubt(base)):
                log.warning("--lora-modules: the adapter %r %s", one.name, doubt)
        self._file = Path(self.run_dir) / FILE if self.run_dir else None
        self._keep(Changed(), ())

    @property
    def runtime(self) -> bool:
        """Whether requests may load adapters."""
        return bool(self.model.allow_runtime_lora)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """All current adapters by name."""
        self._refresh()
        return self._names

    @property
    def default(self) -> Adapter | None:
        """The current adapter, with its scale, for requests that name none; None if they get the base model."""
        self._refresh()
        return self._default

    def check_path(self, path: str) -> None:
        """Raises AdapterError if requests may not load an adapter from this path."""
        if problem := path_problem(path, self.model):
            raise AdapterError(f"{path} {problem}")

    def doubt(self, base: str) -> str:
        """Returns why an adapter made for `base` may not suit the model, as a predicate; empty if nothing says so."""
        if not other_base(base, (*self.model.names, self.model.model)):
            return ""
        return f"was made for {base}, not for {self.model.name}: its answers may make no sense"

    def put(self, adapter: Adapter, *, replace: bool) -> None:
        """Adds an adapter for all frontends. Raises TooMany, and NameTaken if the name exists and `replace` is
        false."""
        with self._changing() as changed:
            changes = changed.adapters
            known = self._given | changes
            if known.get(adapter.name) is not None and not replace:
                raise NameTaken
            if adapter.name not in changes and len(changes) >= MAX_LOADED:
                raise TooMany
            changes[adapter.name] = adapter

    def remove(self, name: str) -> None:
        """Removes an adapter from all frontends. Raises NoSuchAdapter."""
        with self._changing() as changed:
            changes = changed.adapters
            if (self._given | changes).get(name) is None:
                raise NoSuchAdapter
            if name in self._given:
                changes[name] = None
            else:
                del changes[name]
            if changed.default is not None and changed.default.name == name:
                changed.default = None

    def set_default(self, default: Default | None) -> None:
        """Sets the adapter of requests that name none, for all frontends; None: no adapter. Raises NoSuchAdapter."""
        with self._changing() as changed:
            if default is not None and (self._given | changed.adapters).get(default.name) is None:
                raise NoSuchAdapter
            changed.default = default

    @contextmanager
    def _changing(self) -> Iterator[Changed]:
        """Yields the changes under a lock, for the caller to edit, and then stores them. After an exception, stores
        nothing."""
        if self._file is None:
            changed = Changed(dict(self._changed.adapters), self._changed.default)
            yield changed
            self._keep(changed, ())
            return
        with (self._file.parent / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            changed = _read(self._file)
            yield changed
            new = self._file.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgspec.json.encode(changed))
            new.replace(self._file)
            self._keep(changed, _stamp(self._file))

    def _refresh(self) -> None:
        if self._file is not None and self.runtime and (now := _stamp(self._file)) != self._seen:
            self._keep(_read(self._file), now)

    def _keep(self, changed: Changed, stamp: tuple[int, ...]) -> None:
        self._changed, self._seen = changed, stamp
        self._names = {name: one for name, one in (self._given | changed.adapters).items() if one is not None}
        default = changed.default
        known = None if default is None else self._names.get(default.name)
        self._default = (
            None if default is None or known is None else msgspec.structs.replace(known, scale=default.scale)
        )


async def describe_in_child(name: str, path: str) -> tuple[Adapter, str]:
    """Like `describe`, in a child process with limits of time and memory, because anybody may have written the files.
    Also returns the base that the adapter names.

    Raises AdapterError, and Overloaded if it cannot be done now.
    """
    try:
        real, sha256, base = await DESCRIBING.call(path, seconds=SECONDS + size_of(path) / BYTES_PER_S)
    except (NotStarted, Killed) as error:
        raise Overloaded(f"the adapter was not read: {error}", code="not_ready", retry_after=1.0) from error
    except Raised as error:
        raise AdapterError(str(error).removeprefix(f"{AdapterError.__name__}: ")) from None
    except Lost as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    return Adapter(name, real, sha256), base


def described(path: str) -> tuple[str, str, str]:
    """Returns the path and the hash of an adapter, and the base that it names; runs in the child. Raises
    AdapterError."""
    adapter, base = _describe("", path, 0)
    return adapter.path, adapter.sha256, base


SECONDS = 10.0  # time limit for reading an adapter, in addition to the time for its bytes
BYTES_PER_S = 32 << 20  # the slowest disk that is expected
MEGABYTES = (MAX_WEIGHTS_BYTES >> 20) + 512  # address space, most of it for the map of a file
DESCRIBING = FairChildren(
    "adapter", f"{__name__}:described", 2, megabytes=MEGABYTES, most_waiting=16, doing="adapters wait to be read"
)


def describe(name: str, path: str, max_rank: int = 0) -> Adapter:
    """Reads the files of an adapter, and returns the adapter with its hash. Raises AdapterError.

    max_rank: the highest rank that is accepted; 0: any
    """
    return _describe(name, path, max_rank)[0]


def _describe(name: str, path: str, max_rank: int) -> tuple[Adapter, str]:
    files = read_files(path, mapped=True)
    (read_gguf if files.is_gguf else low_rank_modules)(files, max_rank)
    return Adapter(name, os.path.realpath(path), files.sha256), base_of(files)


def _stamp(file: Path) -> tuple[int, ...]:
    """Returns a value that changes whenever the file is replaced; empty if there is no file."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(file: Path) -> Changed:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Changed)
    except FileNotFoundError:
        return Changed()
