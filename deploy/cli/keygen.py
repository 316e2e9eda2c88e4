"""`sluice keygen DIR`: makes the keys with which worker and frontends know each other over tcp://.

Knows files and modes; what they mean is told in shared/curve.py. Never writes over a key unless told to.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from deploy.supervisor.child_command import CliError
from shared.curve import ALLOWED
from shared.flags import Parser

TOLD = """\
{folder} now holds
  {worker}  the worker's pair, secret and public
  {frontend}  a frontend's
  {allowed}  lets that frontend in; take it away to shut it out

copy to the worker's host:     worker.key_secret and the folder allowed
copy to the frontend's host:   {name}.key_secret{renamed} and worker.key
Start both with --curve-dir naming that folder; the worker with tcp:// in --request-address and --event-address,
the frontend with it in --worker-addresses."""


def parser() -> Parser:
    made = Parser(prog="sluice keygen", description="Makes CURVE keys for worker and frontends on different hosts.")
    made.add_argument("folder", metavar="DIR", help="where to put them (mode 0700)")
    made.add_argument("--add", metavar="NAME", default="", help="only a pair for one more frontend")
    made.add_argument("--force", action="store_true", help="replace keys that are there")
    return made


def keygen(words: list[str]) -> int:
    given = parser().read(words)
    if given.add and (not re.fullmatch(r"[A-Za-z0-9._-]+", given.add) or given.add == "worker"):
        raise CliError(f"--add {given.add}: a frontend's name is made of letters, digits, '.', '_' and '-'", 2)
    folder = Path(given.folder)
    try:
        make(folder, *([given.add] if given.add else ["worker", "frontend"]), force=given.force)
    except OSError as error:
        raise CliError(f"cannot make keys in {folder}: {error.strerror or error}", 1) from error
    print(told(folder, given.add or "frontend"))
    return 0


def told(folder: Path, name: str) -> str:
    """What is there now and where it goes, after a pair for the frontend `name` was made."""
    pairs = {role: f"{file}.key_secret, {file}.key" for role, file in (("worker", "worker"), ("frontend", name))}
    files = {**pairs, "allowed": f"{ALLOWED}/{name}.key"}
    width = max(map(len, files.values()))
    renamed = "" if name == "frontend" else " as frontend.key_secret"
    return TOLD.format(
        folder=folder, name=name, renamed=renamed, **{role: file.ljust(width) for role, file in files.items()}
    )


def make(folder: Path, *names: str, force: bool = False) -> None:
    """A pair for each name, all or none; every one but the worker's may connect.

    Raises Failure when one is there already (unless `force`), OSError when the folder cannot be written.
    """
    import zmq.auth

    there = [path.name for name in names for path in folder.glob(f"{name}.key*")]
    if there and not force:
        raise CliError(f"{folder} has {', '.join(sorted(there))} already; --force replaces them", 1)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    (folder / ALLOWED).mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as draft:
        for name in names:
            zmq.auth.create_certificates(draft, name)
        for path in sorted(Path(draft).iterdir()):
            path.chmod(0o600)
            if path.suffix == ".key" and path.stem != "worker":
                copy = Path(shutil.copy2(path, Path(draft) / f"{path.name}.allowed"))
                os.replace(copy, folder / ALLOWED / path.name)
            os.replace(path, folder / path.name)
