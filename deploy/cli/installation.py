"""Prepares the start of a command: reports missing packages, and restores Python's handling of Ctrl-C."""

import signal
import sys
from importlib.util import find_spec

from deploy.supervisor.child_command import CliError

# Packages that a worker needs in addition to a frontend's packages (requirements-frontend.txt).
WORKER_PACKAGES = ("torch", "safetensors", "numpy")


def missing_package(name: str) -> str:
    """Returns an error message for a missing package, with the command that installs it."""
    return f"the package {name} is not installed in this Python; run: {sys.executable} -m pip install {name}"


def require_worker_packages() -> None:
    """Raises CliError if packages of a worker are missing. Imports none of them, because torch takes seconds."""
    missing = [name for name in WORKER_PACKAGES if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise CliError(
            f"a worker needs {' and '.join(missing)}, which this Python does not have; run: {sys.executable} -m pip "
            f"install {names}",
            3,
        )


def allow_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again. Before this call, Ctrl-C ends the process at once (see sluice.py)."""
    if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)
