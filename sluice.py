"""The one public module of an installation: the command `sluice`, and `from sluice import LLM`.

The packages are named frontend, worker, shared, deploy and bench. Other projects use these names, too, so a wheel
installs the packages in a folder that no search path has, and only this module finds them there. In a clone the
packages lie beside this file.
"""

import os
import signal
import sys

if os.path.basename(sys.argv[0]) == "sluice":  # while the command starts, Ctrl-C has nothing to clean up
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.offline.llm import LLM

__all__ = ["LLM"]

PACKAGES = ("shared", "frontend", "worker", "deploy", "bench")

_here = os.path.dirname(os.path.abspath(__file__))
_installed = os.path.join(_here, "sluice_server")  # setup.py names this folder
HOME = _installed if os.path.isdir(_installed) else _here


def main() -> int:
    """Runs the command line, and returns its exit code."""
    from deploy.cli.main import main as run

    return run()


def _import_packages() -> None:
    """Imports the packages from HOME, even if the search path has other packages of these names.

    Raises ImportError if another package of such a name was imported before.
    """
    sys.path.insert(0, HOME)
    try:
        for name in PACKAGES:
            place = next(iter(getattr(import_module(name), "__path__", ["a module of its own"])))
            if os.path.realpath(place) != os.path.realpath(os.path.join(HOME, name)):
                raise ImportError(f"sluice needs the package name {name!r}, which this program uses for {place}")
    finally:
        sys.path.remove(HOME)


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from deploy.offline.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_import_packages()

if __name__ == "__main__":
    sys.exit(main())
