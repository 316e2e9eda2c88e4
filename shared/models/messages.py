"""The messages between frontends and the launcher about models, and their frames on the control socket.

The launcher sends a `Table` after every change. A frontend answers each with a `Seen`, and sends one whenever its
requests begin or end to need a model. Both sides tell their whole state each time, so a process that starts late or
again misses nothing. The launcher answers each `Reload` with a `Reloaded`. A frame is a length of four bytes
(little-endian) and a message in msgpack.
"""

import asyncio
import struct
from typing import Literal

import msgspec

SOCKET = "models.sock"  # in the run folder
MOST_FRAME_BYTES = 4 << 20
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


class ModelState(msgspec.Struct, frozen=True, array_like=True):
    """A model as the launcher knows it.

    reason: why it failed, else empty
    folder: with its tokenizer; empty before it was loaded once
    nbytes: what it takes of the memory for all models: weights, K/V pool and its process; 0 while not known
    attempts: how often the launcher has tried to load it
    keep_alive: seconds that it stays without requests; None: until its memory is needed
    expires_at: when it is unloaded if no request comes, in seconds since 1970; None: a request needs it now, or the
        time does not matter
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
    """From the launcher: all models, those that have left the table included until they are unloaded.

    version: counts the changes
    reading: how often the table was read; after a change of it, the entries in the run folder are new
    asleep: no model is loaded, and none will be until a frontend sends another `Sleep`
    """

    version: int
    models: tuple[ModelState, ...]
    reading: int = 1
    asleep: bool = False


class Reloaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the launcher, after the `Table` that has what was read. problem: why nothing could be read, else empty"""

    problem: str = ""


class Seen(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: the version of the latest table that it acts on, and what its requests need at this moment.

    used: models that its requests compute with
    wanted: models that its requests wait for
    """

    version: int
    used: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: how long a loaded model stays without requests, from now on and until it is unloaded.

    seconds: 0 unloads it as soon as no request needs it; None: as --keep-alive says; infinity: until memory is needed
    """

    name: str
    seconds: float | None


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: load the model although no request waits for it."""

    name: str


class Reload(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: read the table of models again."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a frontend: unload all models, pinned ones, too, and load none; or load those again that were loaded."""

    asleep: bool


FromFrontend = Seen | Keep | Load | Reload | Sleep
FromLauncher = Table | Reloaded

_encoder = msgspec.msgpack.Encoder()
_from_launcher: msgspec.msgpack.Decoder[FromLauncher] = msgspec.msgpack.Decoder(FromLauncher)
_from_frontend: msgspec.msgpack.Decoder[FromFrontend] = msgspec.msgpack.Decoder(FromFrontend)


def frame(message: FromLauncher | FromFrontend) -> bytes:
    body = _encoder.encode(message)
    return struct.pack("<I", len(body)) + body


async def read_from_launcher(reader: asyncio.StreamReader) -> FromLauncher:
    """Raises EOFError, OSError or ValueError if none arrives whole."""
    return _from_launcher.decode(await _body(reader))


async def read_from_frontend(reader: asyncio.StreamReader) -> FromFrontend:
    """Raises EOFError, OSError or ValueError if none arrives whole."""
    return _from_frontend.decode(await _body(reader))


async def _body(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    if length > MOST_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return await reader.readexactly(length)
