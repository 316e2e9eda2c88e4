"""Fetches the GGUF files that `org/repository:NAME` means, and no others, from the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import HUB_NAME, Model, chosen, listed, models_among
from shared.gguf.tower_file import OFF, TowerFile, given_tower, tower_among
from shared.gguf.translated import gguf_cache, temporary_folder, translated
from shared.hf_hub import Progress, cached_file, fetch, fetch_beginning, file_names

BEGINNING = 32 << 20  # bytes to fetch; the metadata of the largest vocabularies takes a third of them


def fetch_model(
    name: str,
    revision: str = "",
    *,
    mmproj: str = "",
    prefer_cache: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> tuple[list[Path], TowerFile | None]:
    """Returns the files that `name` means, and the file of the model's vision tower; downloads what the cache lacks.

    name: must match HUB_NAME. mmproj: the value of --mmproj; if empty, the tower is the one that lies beside the model.
    prefer_cache: if the cache has all these files, use them without asking the hub for newer ones.
    Raises GgufError when the repository has no such files, and HubError when it cannot be reached.
    """
    if prefer_cache:
        with suppress(GgufError):  # the cache may lack the files that `name` means
            files, tower = _fetched(name, revision, mmproj, True, on_progress)
            if all(file.exists() for file in (*files, *([tower.path] if tower else []))):
                return files, tower
    return _fetched(name, revision, mmproj, False, on_progress)


def _fetched(
    name: str, revision: str, mmproj: str, prefer_cache: bool, on_progress: Progress
) -> tuple[list[Path], TowerFile | None]:
    repository, model, tower = _model(name, revision, mmproj, prefer_cache)
    folder = fetch(
        repository, [*model, *([tower] if tower else [])], revision=revision, prefer_cache=prefer_cache, ignored=(),
        on_progress=on_progress,
    )  # fmt: skip
    beside = TowerFile(folder / tower, given=False) if tower else None
    return [folder / file for file in model], _given(mmproj) or beside


def _given(mmproj: str) -> TowerFile | None:
    return given_tower(mmproj) if mmproj not in ("", OFF) else None


def fetch_text(name: str, revision: str = "", mmproj: str = "") -> Path:
    """Returns a folder with what a frontend needs, tokenizer and configuration, of the model that `name` means.

    Downloads only the beginnings of its first file and of its tower, so that a frontend need not wait for the weights.
    Raises as `fetch_model` does.
    """
    repository, model, tower = _model(name, revision, mmproj, prefer_cache=False)
    file = _beginning(repository, model[0], revision)
    beside = TowerFile(_beginning(repository, tower, revision), given=False) if tower else None
    try:
        return translated([file], tower=_given(mmproj) or beside, only_text=True)
    except GgufError:  # the file is broken, or its metadata is longer than BEGINNING
        files, whole = fetch_model(name, revision, mmproj=mmproj)
        return translated(files, tower=whole, only_text=True)


def _beginning(repository: str, file: str, revision: str) -> Path:
    """Returns the file in the hub's cache, or else a file with only the beginning of the hub's file."""
    cached = cached_file(repository, file, revision=revision)
    return cached or fetch_beginning(repository, file, BEGINNING, _writable_cache(), revision=revision)


def _model(name: str, revision: str, mmproj: str, prefer_cache: bool) -> tuple[str, Model, str | None]:
    """Returns the repository, the names of the model's files, and the tower's name unless --mmproj names the tower."""
    found = HUB_NAME.fullmatch(name)
    assert found is not None
    names = file_names(found["repository"], revision=revision, prefer_cache=prefer_cache)
    model = chosen(found["repository"], names, found["wanted"])
    return found["repository"], model, None if mmproj else tower_among(names, model)


def _writable_cache() -> Path:
    try:
        return gguf_cache()
    except OSError:
        return temporary_folder()


def check_not_only_gguf(repository: str, revision: str = "") -> list[str]:
    """Returns the names of a repository's files.

    Raises a GgufError that lists the quantizations if the weights are GGUF files.
    """
    names = file_names(repository, revision=revision)
    if models := models_among(names):
        raise GgufError(
            f"{repository!r} has GGUF files, so say which: {repository}:NAME, where NAME is one of {listed(models)}"
        )
    return names
