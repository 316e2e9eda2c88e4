"""The messages between frontends and the launcher about models, and their frames on the control socket.

Clients may also have models fetched and named (--allow-pull). A `Pull`, `Add`, `Create`, `Copy` or `Delete` has a
ticket, the frontend's number for it, and the launcher answers each with a `Done`. All frontends get the progress of all
downloads.

The launcher sends a `Table` after every change. A frontend answers each `Table` with a `Seen`, and also sends a `Seen`
when the set of models that its requests need changes. Both messages carry the sender's whole state, so a process that
starts late or again misses nothing. The launcher answers each `Reload` with a `Reloaded`. A frame is a length of four
bytes (little-endian) and a message in msgpack.
"""

import asyncio
import struct
from typing import Literal

import msgspec

from shared.preset import Preset

SOCKET = "models.sock"  # the control socket, in the run folder
MOST_FRAME_BYTES = 4 << 20
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ModelState(msgspec.Struct, frozen=True, array_like=True):
    """A model as the launcher knows it.

    reason: why the model failed, else empty
    folder: the folder with the model's tokenizer; empty before the model was loaded once
    nbytes: memory of the model: weights, K/V pool and worker process; 0 while not known
    attempts: how often the launcher has tried to load the model
    keep_alive: seconds that the model stays loaded without requests; None: until its memory is needed
    expires_at: when the model is unloaded if no request comes, in seconds since 1970; None: a request needs the model
        now, or no time is set
    """

    name: str
    state: State
    reason: str = ""
    folder: str = ""
    nbytes: int = 0
    attempts: int = 0
    keep_alive: float | None = None
    expires_at: float | None = None


class Table(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the launcher: all models. A model that was removed from the table stays here until it is unloaded.

    version: counts the changes
    reading: how often the table was read; when this number grows, the frontend reads the run folder's entries again
    asleep: whether all models are unloaded, and stay so until a frontend sends another `Sleep`
    """

    version: int
    models: tuple[ModelState, ...]
    reading: int = 1
    asleep: bool = False


class Reloaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the launcher, after the `Table` that was read. problem: why the table could not be read, else empty"""

    problem: str = ""


class Seen(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: the version of the latest table that it acts on, and the models that its requests need now.

    used: models that its requests compute with
    wanted: models that its requests wait for
    """

    version: int
    used: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: how long a loaded model stays loaded without requests. Holds until the model is unloaded.

    seconds: 0: unload when no request needs the model; None: as --keep-alive says; infinity: until memory is needed
    """

    name: str
    seconds: float | None


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: load the model although no request waits for it."""

    name: str


class Unusable(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: it cannot serve the model that is loaded or loading, because of its tokenizer or template.

    reason: one sentence
    """

    name: str
    reason: str


class Reload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: read the table of models again."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: unload all models, even pinned ones, and load none; or wake and load the same models again."""

    asleep: bool


class Pull(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: fetch the model that `name` means, and add it to the table.

    Equal pulls share one download, which ends when nobody waits for it any more.
    """

    ticket: int
    name: str


class Create(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: make a name for a model, or replace one that was made so."""

    ticket: int
    name: str
    preset: Preset


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: add an uploaded file to the table under a name, or replace one that was added so.

    digest: of the file, as `shared.model_library.uploaded_file` takes it
    """

    ticket: int
    name: str
    digest: str


class Copy(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: make another name for a model."""

    ticket: int
    source: str
    destination: str


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: remove a name and, with the last name of a pulled model, its files."""

    ticket: int
    name: str


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: nobody waits for the `Done` of this ticket any more."""

    ticket: int


class Download(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the launcher: how far the download of a model has come.

    name: what was asked for, or the name of the table's model that is fetched because a request needs it
    status: in Ollama's words; "success" ends a download. error: why it failed, which ends it; else empty
    digest: of the file that is fetched, as "sha256:…"; empty: of no file
    total, completed: bytes of this file
    """

    name: str
    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0
    error: str = ""

    @property
    def ended(self) -> bool:
        return bool(self.error) or self.status == "success"


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the launcher: the answer to a ticket, after the `Table` with its effect. problem: why it failed, else empty;
    code: the reason for machines"""

    ticket: int
    problem: str = ""
    code: str = ""


Ask = Pull | Add | Create | Copy | Delete | Forget
Order = Keep | Load | Sleep | Unusable
FromFrontend = Seen | Reload | Order | Ask
FromLauncher = Table | Reloaded | Download | Done

_encoder = msgspec.msgpack.Encoder()
_from_launcher: msgspec.msgpack.Decoder[FromLauncher] = msgspec.msgpack.Decoder(FromLauncher)
_from_frontend: msgspec.msgpack.Decoder[FromFrontend] = msgspec.msgpack.Decoder(FromFrontend)


def frame(message: FromLauncher | FromFrontend) -> bytes:
    body = _encoder.encode(message)
    return struct.pack("<I", len(body)) + body


async def read_from_launcher(reader: asyncio.StreamReader) -> FromLauncher:
    """Reads the launcher's next message. Raises EOFError, OSError or ValueError if no whole message arrives."""
    return _from_launcher.decode(await _body(reader))


async def read_from_frontend(reader: asyncio.StreamReader) -> FromFrontend:
    """Reads a frontend's next message. Raises EOFError, OSError or ValueError if no whole message arrives."""
    return _from_frontend.decode(await _body(reader))


async def _body(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    if length > MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)
