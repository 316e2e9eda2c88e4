"""`sluice keygen DIR`: makes the CURVE keys that authenticate workers and frontends over tcp://.

`sluice keygen --receipt-key FILE` makes the Ed25519 key that signs receipts. Knows files and modes;
shared/wire.py explains how CURVE keys are used. Never replaces a key without --force.
"""

import base64
import os
import re
import shutil
import tempfile
from pathlib import Path

from deploy.launcher.child_command import CliError
from deploy.launcher.run_dir import holds_others_files
from shared.config.flags import Parser
from shared.wire import ALLOWED

SUMMARY = """\
{folder} now contains
  {worker}  the worker's secret and public key
  {frontend}  a frontend's keys
  {allowed}  admits that frontend; delete it to lock the frontend out

copy to the worker's host:     worker.key_secret and the folder allowed
copy to the frontend's host:   {name}.key_secret{renamed} and worker.key
Start both with --curve-dir set to that folder; the worker with tcp:// in --request-address and --event-address,
the frontend with tcp:// in --worker-addresses."""


def parser() -> Parser:
    parser = Parser(
        prog="sluice keygen",
        description="Make CURVE keys for workers and frontends on different hosts, or a key that signs receipts.",
    )
    parser.add_argument("folder", metavar="DIR", nargs="?", default="", help="folder for the keys (mode 0700)")
    parser.add_argument("--receipt-key", metavar="FILE", default="", help="only make the key of --receipt-key, in FILE")
    parser.add_argument("--add", metavar="NAME", default="", help="only make keys for one more frontend of this name")
    parser.add_argument("--force", action="store_true", help="replace existing keys")
    return parser


def keygen(words: list[str]) -> int:
    args = parser().read(words)
    if bool(args.folder) == bool(args.receipt_key):
        raise CliError("name a folder for CURVE keys, or a file with --receipt-key", 2)
    if args.receipt_key:
        return _receipt_key(Path(args.receipt_key), force=args.force)
    if args.add and (not re.fullmatch(r"[A-Za-z0-9._-]+", args.add) or args.add == "worker"):
        raise CliError(f"--add {args.add}: a frontend's name may contain letters, digits, '.', '_' and '-'", 2)
    folder = Path(args.folder)
    try:
        make_keys(folder, *([args.add] if args.add else ["worker", "frontend"]), force=args.force)
    except OSError as error:
        raise CliError(f"cannot make keys in {folder}: {error.strerror or error}", 1) from error
    print(summary(folder, args.add or "frontend"))
    return 0


def _receipt_key(file: Path, *, force: bool) -> int:
    """Makes the key that signs receipts (PEM, mode 0600), and prints its public key, which every receipt contains."""
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        raise CliError("--receipt-key needs the package cryptography: pip install cryptography", 2) from error
    if file.exists() and not force:
        raise CliError(f"{file} exists; --force replaces it", 1)
    key = Ed25519PrivateKey.generate()
    new = file.with_name(f"{file.name}.new")
    try:
        new.touch(mode=0o600)
        new.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        new.replace(file)
    except OSError as error:
        raise CliError(f"cannot make a key in {file}: {error.strerror or error}", 1) from error
    public = base64.b64encode(key.public_key().public_bytes_raw()).decode()
    print(f"{file} has a new key: start servers with --receipt-key {file}")
    print(f"public key, which their receipts name: {public}")
    return 0


def summary(folder: Path, name: str) -> str:
    """Returns the text that tells the user which files were made for the frontend `name`, and where to copy them."""
    pairs = {role: f"{file}.key_secret, {file}.key" for role, file in (("worker", "worker"), ("frontend", name))}
    files = {**pairs, "allowed": f"{ALLOWED}/{name}.key"}
    width = max(map(len, files.values()))
    renamed = "" if name == "frontend" else " as frontend.key_secret"
    return SUMMARY.format(
        folder=folder, name=name, renamed=renamed, **{role: file.ljust(width) for role, file in files.items()}
    )


def make_keys(folder: Path, *names: str, force: bool = False) -> None:
    """Makes a key pair for each name. Public keys, except the worker's, are also put into allowed/.

    Raises CliError, and makes no pair, if a file of one of the pairs exists and `force` is false. Raises OSError if the
    folder cannot be written.
    """
    import zmq.auth

    existing = [path.name for name in names for path in folder.glob(f"{name}.key*")]
    if existing and not force:
        raise CliError(f"{folder} already has {', '.join(sorted(existing))}; --force replaces them", 1)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if holds_others_files(folder, "*.key*"):
        raise CliError(
            f"{folder} is used by other programs: name a folder for keys alone, which others cannot enter", 1
        )
    folder.chmod(0o700)
    (folder / ALLOWED).mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        for name in names:
            zmq.auth.create_certificates(staging, name)
        for path in sorted(Path(staging).iterdir()):
            path.chmod(0o600)
            if path.suffix == ".key" and path.stem != "worker":
                copy = Path(shutil.copy2(path, Path(staging) / f"{path.name}.allowed"))
                os.replace(copy, folder / ALLOWED / path.name)
            os.replace(path, folder / path.name)
