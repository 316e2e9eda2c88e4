"""`sluice models`: the models on this machine's disk, with their sizes and last use; removes one.

A model lies in the cache of the Hugging Face hub, which other programs share, or in Sluice's own, if it came in a
Python package. In a repository with GGUF files, each of them is a model. Knows files; loads none.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from deploy.cli.chat import list_served
from deploy.cli.doctor import hub_cache
from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.launcher.child_command import CliError
from deploy.launcher.packaged_model import SMOLLM2
from shared.config.flags import Parser
from shared.gguf.naming import Model, models_among, quantization_of
from shared.private_files import cache_folder

UNITS = ("B", "kB", "MB", "GB", "TB")
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on the disk. name: what `sluice serve` and `sluice run` take. size: bytes of its files.

    links: its files under readable names; where they are links into a cache, the bytes lie elsewhere. used: the time of
    the last use, in seconds since 1970; the time of the download, where it was not used since.
    whole: whether it is all that its repository has here, so that the whole folder of the repository can go.
    """

    name: str
    size: int
    used: float
    links: tuple[Path, ...]
    whole: bool = False


def parser() -> Parser:
    parser = Parser(
        prog="sluice models",
        usage="sluice models [--rm NAME ...] [--url URL]",
        description="List the models on this machine: name, size, last use. With --url, list the models of a server: "
        "name, status, and context length in tokens.",
    )
    parser.add_argument("--rm", metavar="NAME", nargs="+", help="remove these models from the disk")
    parser.add_argument("--url", help=f"list the models of the server at this address, for example {DEFAULT_URL}")
    add_key(parser)
    return parser


def models(words: list[str]) -> int:
    """Prints a line for each model, and returns the exit code. Raises CliError for an unknown name, or if the server
    does not answer."""
    args = parser().read(words)
    if args.url:
        if args.rm:
            raise CliError("--rm removes models of this machine's disk: it does not go with --url", 2)
        return list_served(Server(args.url, args.api_key))
    found = stored_models()
    if args.rm:
        for name in args.rm:
            model = _named(found, name)
            remove(model)
            print(f"removed {model.name}: {size_text(model.size)} are free again")
        return 0
    if not found:
        print("no models are on this machine yet; `sluice run smollm2` fetches a small one")
        return 0
    rows = [("NAME", "SIZE", "LAST USE"), *((one.name, size_text(one.size), ago(one.used)) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, size, used in rows:
        print(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {used}")
    print(f"\n{size_text(sum(one.size for one in found))} in all; `sluice models --rm NAME` removes one")
    return 0


def stored_models() -> list[StoredModel]:
    """Returns the models on the disk, the last used first."""
    found = [*_packaged(), *_of_hub(hub_cache())]
    return sorted(found, key=lambda model: (-model.used, model.name))


def remove(model: StoredModel) -> None:
    """Removes a model's files from the disk. A file that another model of its repository shares stays.

    Raises CliError if a file cannot be removed.
    """
    try:
        if model.whole:
            shutil.rmtree(model.links[0].parents[_depth(model.links[0])])
            return
        for link in model.links:
            blob = link.resolve()
            link.unlink()
            if blob != link and not _is_shared(blob, _snapshots(link)):
                blob.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"{model.name} cannot be removed: {error.filename}: {error.strerror}", 1) from error


def _packaged() -> Iterator[StoredModel]:
    path = cache_folder() / "models" / Path(SMOLLM2.file).name
    with suppress(OSError):
        found = path.stat()
        yield StoredModel(SMOLLM2.name, found.st_size, max(found.st_atime, found.st_mtime), (path,))


def _of_hub(cache: Path) -> Iterator[StoredModel]:
    """Yields the models of the hub's cache: models--org--name/snapshots/COMMIT/FILE, where files are links to blobs."""
    with suppress(OSError):
        for folder in sorted(cache.glob("models--*--*")):
            repository = folder.name.removeprefix("models--").replace("--", "/")
            files = [path for path in (folder / "snapshots").glob("*/**/*") if path.is_file()]
            names: dict[str, list[Path]] = {}
            for file in files:
                names.setdefault("/".join(file.relative_to(folder / "snapshots").parts[1:]), []).append(file)
            models = models_among(names)
            if not models or any(name.endswith(".safetensors") for name in names):
                if files:
                    yield _stored(repository, files, whole=True)
                continue
            for model in models:
                links = [link for name in model for link in names[name]]
                yield _stored(f"{repository}:{_short(model, models)}", links, whole=len(models) == 1)


def _short(model: Model, models: list[Model]) -> str:
    """Returns what names this model among those of its repository: its quantization, or else its file."""
    wanted = quantization_of(model)
    return wanted if sum(quantization_of(other) == wanted for other in models) == 1 else model[0]


def _stored(name: str, links: list[Path], *, whole: bool) -> StoredModel:
    blobs = {link.resolve() for link in links}
    stats = [blob.stat() for blob in blobs]
    used = max(max(stat.st_atime, stat.st_mtime) for stat in stats)
    return StoredModel(name, sum(stat.st_size for stat in stats), used, tuple(links), whole)


def _depth(link: Path) -> int:
    """Returns how far above a file of a snapshot its repository's folder is, counted as `Path.parents` does."""
    return next(n for n, folder in enumerate(link.parents) if folder.name.startswith("models--"))


def _snapshots(link: Path) -> Path | None:
    """Returns the folder of the snapshots of a file in the hub's cache; None for a file elsewhere."""
    return next((folder for folder in link.parents if folder.name == "snapshots"), None)


def _is_shared(blob: Path, snapshots: Path | None) -> bool:
    return snapshots is not None and any(other.resolve() == blob for other in snapshots.glob("*/**/*"))


def _named(found: list[StoredModel], name: str) -> StoredModel:
    for model in found:
        if model.name.casefold() == name.casefold():
            return model
    close = get_close_matches(name, [model.name for model in found], n=1)
    raise CliError(f"--rm {name}: " + (f"did you mean {close[0]}?" if close else "see sluice models"), 2)


def size_text(nbytes: float) -> str:
    """Returns a size for people, such as "93 MB" or "4.9 GB"; a kB has a thousand bytes, as files are listed."""
    unit = 0
    while nbytes >= 1000 and unit < len(UNITS) - 1:
        nbytes, unit = nbytes / 1000, unit + 1
    return f"{nbytes:.1f} {UNITS[unit]}" if unit >= 3 else f"{nbytes:.0f} {UNITS[unit]}"


def ago(then: float, now: float | None = None) -> str:
    """Returns how long ago a moment was, in words."""
    seconds = (time.time() if now is None else now) - then
    for length, word in ((DAY, "day"), (HOUR, "hour"), (MINUTE, "minute")):
        if (count := int(seconds // length)) > 0:
            return f"{count} {word}{'s' * (count > 1)} ago"
    return "just now"
