"""The text to predict: English prose in the public domain, from the test data of a Python package.

`brotli` ships two books of Project Gutenberg: Alice's Adventures in Wonderland, and the proceedings of a Library of
Congress workshop. Hard-wrapped lines are joined to paragraphs.
"""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

from bench.client.server import BenchError
from bench.real.base_file import Window

PACKAGE, VERSION = "brotli", "1.2.1"
SHA256 = {
    "alice29.txt": "7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0",
    "lcet10.txt": "5314ba1dbb03f471df88bec6cd120a938ef60d0fd3511c5c1dce61bf7463245f",
}


def packaged_text(root: Path) -> str:
    """Returns the text. Downloads the source package into `root` unless it is already there. Raises BenchError."""
    archive = root / f"{PACKAGE}-{VERSION}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", PACKAGE, "-d", str(root)]
        try:
            subprocess.run([*pip, f"{PACKAGE}=={VERSION}"], check=True)
        except subprocess.CalledProcessError as error:
            raise BenchError(f"{PACKAGE} {VERSION} could not be downloaded; --text FILE takes another text") from error
    with tarfile.open(archive) as tar:
        return "\n\n".join(_member(tar, name) for name in SHA256)


def _member(tar: tarfile.TarFile, name: str) -> str:
    file = tar.extractfile(f"{PACKAGE}-{VERSION}/tests/testdata/{name}")
    assert file is not None
    content = file.read()
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise BenchError(f"{name} of {PACKAGE} {VERSION} is not the file that is meant to be measured")
    return paragraphs(content.decode("latin-1"))


def paragraphs(text: str) -> str:
    """Joins each paragraph to one line. Empty lines separate the paragraphs."""
    blocks = text.replace("\r\n", "\n").split("\n\n")
    return "\n\n".join(line for block in blocks if (line := " ".join(block.split())))


def windows_of(ids: list[int], length: int, count: int, bos: int | None) -> list[Window]:
    """Cuts ids into windows and returns `count` evenly spread windows. bos: if not None, the first id of each
    window."""
    known = len(ids) // length
    if known < count:
        raise BenchError(f"the text has {known} windows of {length} tokens; --windows asks for {count}")
    cut = [ids[at * length : (at + 1) * length] for at in (each * known // count for each in range(count))]
    return cut if bos is None else [[bos, *window[1:]] for window in cut]
