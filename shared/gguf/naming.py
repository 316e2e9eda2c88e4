"""Finds the GGUF files that a name means (a file, split files, a folder, or a quantization in a hub repository), and
the name that clients use for a model.

A model is a list of file names: one file, or split files in their order.
"""

import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shared.private_files import cache_folder, is_trusted

MAGIC = b"GGUF"
CANNOT_WRITE = 4  # exit code of a translation whose folder cannot be written
INDEX = "gguf.json"  # the index of the tensors in the folder of a translated model
NUMBERS = "numbers.bin"  # a file beside INDEX: tensors that the metadata states as numbers
SUFFIX = ".gguf"
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[A-Z\d]+)*|TQ\d_\d|BF16|F16|F32|(?:MX|NV)FP4(?:_[A-Z\d]+)*))$", re.IGNORECASE
)
HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*):(?P<wanted>.+)")
NO_MODEL = re.compile(r"(^|[/._-])(mmproj|imatrix)([._-]|$)", re.IGNORECASE)  # files without a text model
Model = list[str]


def models_among(names: Iterable[str]) -> list[Model]:
    """Groups files into models: split files of one model form one entry, in the order of their numbers."""
    models: dict[str, Model] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and not NO_MODEL.search(name):
            split = SPLIT.fullmatch(name)
            models.setdefault(name if split is None else f"{split['stem']}/{split['count']}", []).append(name)
    return list(models.values())


def quantization_of(model: Model) -> str:
    """Returns the quantization in the name of the model's first file, in capitals; the whole name if it has none."""
    split = SPLIT.fullmatch(model[0])
    stem = split["stem"] if split else model[0][: -len(SUFFIX)]
    found = QUANTIZATION.search(stem.rpartition("/")[2])
    return found[1].upper() if found else model[0]


def check_complete(model: Model, where: object) -> Model:
    """Returns the model unchanged. Raises GgufError if split files are missing. where: the place named in the error."""
    split = SPLIT.fullmatch(model[0])
    if split is None:
        return model
    count = int(split["count"])
    for number in range(1, count + 1):
        name = f"{split['stem']}-{number:05}-of-{count:05}{SUFFIX}"
        if name not in model:
            raise GgufError(f"{where}: {name} is missing, one of the {count} files of this model")
    return model


def local_model(path: Path) -> list[Path] | None:
    """Returns the GGUF files that a path means; None if the path is no GGUF model.

    path: a file, any of several split files, or a folder that holds one model and no safetensors.
    Raises GgufError when the folder holds several models, or split files are missing.
    """
    if path.is_dir():
        return _in_folder(path)
    if not path.is_file() or not (path.suffix.lower() == SUFFIX or _has_magic(path)):
        return None
    split = SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    models = models_among(other.name for other in path.parent.iterdir())
    model = next(model for model in models if path.name in model)
    return [path.parent / name for name in check_complete(model, path.parent)]


def short_name(model: str) -> str:
    """Returns the name of a model for clients: the last part of a local path; any other `model` is the name itself.

    A folder in the hub's cache gets the name of its repository.
    """
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    if split := SPLIT.fullmatch(path.name):
        return split["stem"]
    return path.stem if path.suffix.lower() == SUFFIX else path.name


def _in_folder(folder: Path) -> list[Path] | None:
    if any(folder.glob("model*.safetensors*")):
        return None
    models = models_among(path.name for path in folder.iterdir())
    if len(models) > 1:
        listed = ", ".join(model[0] for model in models)
        raise GgufError(f"{folder} holds several GGUF models, so name one of the files: {listed}")
    return [folder / name for name in check_complete(models[0], folder)] if models else None


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def chosen(repository: str, names: Iterable[str], wanted: str) -> Model:
    """Returns the model of a repository that `wanted` names by its quantization or file name; case does not matter.

    Raises a GgufError that lists the models if `wanted` names none of them.
    """
    models, sought = models_among(names), wanted.casefold()
    if not models:
        raise GgufError(f"{repository!r} has no GGUF files")
    fitting = [
        model for model in models
        if sought in (quantization_of(model).casefold(), model[0].casefold(), model[0][: -len(SUFFIX)].casefold())
    ]  # fmt: skip
    if not fitting:
        raise GgufError(f"{repository!r} has no {wanted!r}; it has {listed(models)}")
    if len(fitting) > 1:
        files = ", ".join(model[0] for model in fitting)
        raise GgufError(f"{repository!r} has several files for {wanted!r}, so name one of them: {files}")
    return check_complete(fitting[0], repository)


def listed(models: Iterable[Model]) -> str:
    return ", ".join(dict.fromkeys(map(quantization_of, models)))


# The error of everything that is wrong with a GGUF file or its name.


class GgufError(ValueError):
    """The file or name cannot be served. The message is one sentence that names the file and the supported values."""


TEMPORARY = "sluice-gguf-"  # how names of temporary folders begin


def is_translation(folder: Path) -> bool:
    """Returns whether `translated` made the folder: it lies in the cache, or is a temporary folder of this user."""
    parent = folder.absolute().parent
    if parent == (cache_folder() / "gguf").absolute():
        return True
    is_temporary = parent == Path(tempfile.gettempdir()).absolute() and folder.name.startswith(TEMPORARY)
    return is_temporary and is_trusted(folder)
