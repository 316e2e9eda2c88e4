"""Finds the file with the vision tower of a GGUF model (llama.cpp's "mmproj"): named by a flag, or beside the model."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import QUANTIZATION, SPLIT, SUFFIX, Model, models_among

OFF = "off"  # value of --mmproj: use no tower, even if a file of one lies beside the model
MMPROJ = re.compile(r"(^|[._-])mmproj([._-]|$)", re.IGNORECASE)
PREFERRED = ("F16", "BF16", "F32")  # the number formats to prefer if several files hold the tower


@dataclass(frozen=True, slots=True)
class TowerFile:
    """given: whether --mmproj names the tower, which then must fit the model. A found tower may be left out."""

    path: Path
    given: bool


def tower_file(files: list[Path], mmproj: str) -> TowerFile | None:
    """Returns the file of the tower of a model on this machine; None if there is none.

    mmproj: the value of --mmproj. Raises GgufError if --mmproj names no file.
    """
    if mmproj and mmproj != OFF:
        return given_tower(mmproj)
    if mmproj == OFF:
        return None
    try:
        names = [path.name for path in files[0].parent.iterdir()]
    except OSError:
        return None
    found = tower_among(names, [file.name for file in files])
    return TowerFile(files[0].parent / found, given=False) if found else None


def given_tower(mmproj: str) -> TowerFile:
    """Returns the file that --mmproj names. Raises GgufError if there is none."""
    path = Path(mmproj).expanduser()
    if not path.is_file():
        raise GgufError(f"--mmproj {mmproj}: there is no such file")
    return TowerFile(path, given=True)


def tower_among(names: Iterable[str], model: Model) -> str | None:
    """Returns the tower's file among the files of the model's folder or repository; None if there is no tower.

    Where there are several models, a tower belongs to the model with the same name, apart from the quantization.
    """
    listed = list(names)
    folder = model[0].rpartition("/")[0]
    near = [name for name in listed if name.rpartition("/")[0] == folder]
    towers = [name for name in near if name.lower().endswith(SUFFIX) and MMPROJ.search(name.rpartition("/")[2])]
    if len({_plain(other[0]) for other in models_among(near)}) > 1:
        towers = [name for name in towers if _plain(name) == _plain(model[0])]
    return min(towers, key=_order, default=None)


def _plain(name: str) -> str:
    """Returns a file's name without its quantization, without its number among split files and without "mmproj"."""
    file = name.rpartition("/")[2]
    split = SPLIT.fullmatch(file)
    stem = QUANTIZATION.sub("", split["stem"] if split else file[: -len(SUFFIX)])
    return QUANTIZATION.sub("", MMPROJ.sub("-", stem)).strip("._-").casefold()


def _order(name: str) -> tuple[int, str]:
    found = QUANTIZATION.search(MMPROJ.sub("-", name.rpartition("/")[2][: -len(SUFFIX)]).rstrip("._-"))
    type = found[1].upper() if found else ""
    return PREFERRED.index(type) if type in PREFERRED else len(PREFERRED), name
