"""How fast this machine reads memory and multiplies: measured once, and kept in the cache folder.

The measurement is that of `worker/ops/roofline.py`, in a process of its own, because it imports torch. A measurement
holds for the processor, the number of cores and the C library that it was made with. One that was made while the
machine was busy is too low, so it is made again when less runs.
"""

import json
import os
import platform
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from deploy.launcher.child_command import child_environment
from shared.machine import usable_cores
from shared.private_files import private_cache
from worker.ops.native_build import existing, sets_in_use, sets_of_processor

FILE = "machine-speed.json"
BUSY = 1.5  # processes that want to run, for each core; above this, a measurement is too low
MEASURE_S = 60.0  # a measurement takes a second, and the import of torch a few
# The child prints the three rates, or null where the C library does not run.
PROGRAM = (
    "import dataclasses, json; from shared.machine import usable_cores; from worker.ops import roofline; "
    "found = roofline.measure(usable_cores()); print(json.dumps(found and dataclasses.asdict(found)))"
)


@dataclass(frozen=True, slots=True)
class Speed:
    """The rates of all cores together. bf16_gflop_s: None if the instruction set cannot multiply bfloat16 numbers.

    busy: whether other processes had the cores meanwhile, so that the rates are too low
    """

    read_gb_s: float
    fp32_gflop_s: float
    bf16_gflop_s: float | None
    busy: bool = False


def kept_speed() -> Speed | None:
    """Returns the measurement in the cache; None if there is none for this processor, its cores and its library."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((private_cache() / FILE).read_text())
        if kept["machine"] == _machine():
            return Speed(**kept["speed"])
    return None


def measured_speed(*, again: bool = False) -> Speed | None:
    """Returns the kept measurement, or measures (a few seconds) and keeps it. Returns None if there is no C library,
    which is not compiled here, or if the measurement fails.

    again: measure even if the cache has a measurement.
    """
    kept, busy = kept_speed(), is_busy()
    if kept is not None and not again and (busy or not kept.busy):
        return kept
    if not _library():
        return None
    speed = _measured()
    if speed is not None:
        speed = replace(speed, busy=busy)
        with suppress(OSError):  # a cache that cannot be written: the next call measures again
            part = private_cache() / f"{FILE}.{os.getpid()}"
            part.write_text(json.dumps({"machine": _machine(), "speed": asdict(speed)}))
            part.rename(private_cache() / FILE)
    return speed


def is_busy() -> bool:
    """Returns whether other processes have the cores now."""
    return os.getloadavg()[0] > BUSY * usable_cores()


def _measured() -> Speed | None:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAM], env=child_environment(), capture_output=True, text=True,
            timeout=MEASURE_S,
        )  # fmt: skip
        found = json.loads(done.stdout)
        return None if found is None else Speed(**found)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        return None


def _machine() -> list[object]:
    """Returns what a measurement holds for."""
    return [processor(), usable_cores(), _library()]


def _library() -> str:
    """Returns the name of the C library that a worker would use; empty if there is none."""
    if os.environ.get("SLUICE_NATIVE") == "0":
        return ""
    with suppress(OSError, ValueError):
        file = existing(sets_in_use(os.environ, sets_of_processor()))
        return file.name if file else ""
    return ""


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the processor's name, or its architecture if the system does not tell the name."""
    with suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# What the memory modules allow, from the firmware's tables (SMBIOS, type 17).

TABLES = Path("/sys/firmware/dmi/tables/DMI")
MODULE, END = 17, 127  # types of structures
UNKNOWN = (0, 0xFFFF)


@dataclass(frozen=True, slots=True)
class Modules:
    """The memory modules. gb_s: what all of them deliver together, if each has a channel of its own."""

    count: int
    mega_transfers: int  # of the slowest one, per second
    gb_s: float


def memory_modules(tables: Path = TABLES) -> Modules | None:
    """Returns the memory modules; None if the tables are missing, as in most virtual machines, or if only root may read
    them."""
    try:
        data = tables.read_bytes()
    except OSError:
        return None
    rates: list[tuple[int, int]] = []  # millions of transfers per second, bytes of each
    at = 0
    while at + 4 <= len(data):
        kind, length = data[at], data[at + 1]
        if kind == END or length < 4:
            break
        if kind == MODULE and length >= 0x17 and at + length <= len(data):
            rates += _module(data[at : at + length])
        strings = data.find(b"\0\0", at + length)
        if strings < 0:
            break
        at = strings + 2
    if not rates:
        return None
    return Modules(len(rates), min(rate for rate, _ in rates), sum(rate * width for rate, width in rates) / 1000)


def _module(entry: bytes) -> list[tuple[int, int]]:
    """Returns the rate and the width in bytes of a module; an empty list for an empty socket or unknown values."""
    width, size = struct.unpack_from("<HH", entry, 0x0A)
    (rate,) = struct.unpack_from("<H", entry, 0x15)
    if len(entry) >= 0x22:  # the rate that the firmware has set, where the table is new enough
        (configured,) = struct.unpack_from("<H", entry, 0x20)
        rate = rate if configured in UNKNOWN else configured
    return [] if width in UNKNOWN or size == 0 or rate in UNKNOWN else [(rate, width // 8)]
