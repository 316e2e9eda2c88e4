"""Packages that some benches need, and that `make run` does not install: `from bench.packages import httpx`.

Without such a package, the bench ends with a sentence that has the command.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

with suppress(ModuleNotFoundError):
    import httpx as httpx
with suppress(ModuleNotFoundError):
    import psutil as psutil

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Called by the import of a package that was not found."""
        if name not in ("httpx", "psutil"):
            raise AttributeError(name)
        sys.exit(
            f"this bench needs {name}, which `make run` does not install; `make bench` does, and so does: "
            f"{sys.executable} -m pip install {name}"
        )
