"""Packs what a command leaves for the next one: its results, and the kernels that Triton has compiled.

A machine may give back only MOST_FILES files of less than MOST_BYTES each. So results are one archive, and the cache is
one archive that is cut into pieces. Triton's index files hold absolute paths, so the cache is unpacked at its own path.
"""

import io
import lzma
import tarfile
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 16 << 20
MOST_FILES = 8
PIECE_BYTES = 15 << 20
RESULTS = "results.tar.gz"
PIECE = "cache.tar.xz."
NEEDED = (".cubin", ".json", ".so")  # the files that Triton reads; intermediate code is left out
XZ_PRESET = 2


def pack_results(folder: Path, out: Path) -> None:
    """Packs a folder of results into one archive in `out`, which replaces an earlier one only when it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    new = out / f".{RESULTS}"
    with tarfile.open(new, "w:gz") as tar:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                tar.add(file, str(file.relative_to(folder)))
    new.replace(out / RESULTS)


def unpack_results(out: Path, folder: Path) -> bool:
    """Unpacks the results that an earlier command has left in `out`. Returns whether there were any."""
    if not (out / RESULTS).exists():
        return False
    with tarfile.open(out / RESULTS) as tar:
        tar.extractall(folder, filter="data")
    return True


def pack_cache(cache: Path, out: Path) -> str:
    """Packs Triton's cache into pieces in `out`, in place of earlier ones. Returns a sentence about it."""
    data = io.BytesIO()
    files = [file for file in sorted(cache.rglob("*")) if file.suffix in NEEDED and file.is_file()]
    with lzma.open(data, "wb", preset=XZ_PRESET) as packing, tarfile.open(fileobj=packing, mode="w") as tar:
        for file in files:
            tar.add(file, str(file.absolute()).lstrip("/"))
    packed = data.getvalue()
    pieces = [packed[begin : begin + PIECE_BYTES] for begin in range(0, len(packed), PIECE_BYTES)]
    if len(pieces) >= MOST_FILES:
        return f"the compiled kernels take {len(packed) / 1e6:.0f} MB, which is too much to keep"
    for old in out.glob(f"{PIECE}*"):
        old.unlink()
    for number, piece in enumerate(pieces):
        (out / f"{PIECE}{number:02d}").write_bytes(piece)
    kernels = sum(file.suffix == ".cubin" for file in files)
    return f"{kernels} compiled kernels are kept, in {len(packed) / 1e6:.1f} MB"


def unpack_cache(out: Path, root: Path = Path("/")) -> bool:
    """Unpacks the pieces in `out`, or the archive of --precompile if it lies there. Returns whether there were any."""
    pieces = sorted(out.glob(f"{PIECE}*"))
    archives: Iterable[io.BytesIO] = [io.BytesIO(b"".join(piece.read_bytes() for piece in pieces))] if pieces else []
    precompiled = [io.BytesIO(file.read_bytes()) for file in out.glob("*.tar.gz") if file.name != RESULTS]
    found = [*archives, *precompiled]
    for archive in found:
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(root, filter="data")
    return bool(found)
