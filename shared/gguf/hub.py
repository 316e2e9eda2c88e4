"""Fetches the GGUF files that `org/repository:NAME` means, and no others, from the Hugging Face hub."""

from contextlib import suppress
from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import HUB_NAME, Model, chosen, listed, models_among
from shared.gguf.translated import gguf_cache, temporary_folder, translated
from shared.hf_hub import Progress, cached_file, fetch, fetch_beginning, file_names

BEGINNING = 32 << 20  # bytes: the metadata of the largest vocabularies takes a third of it


def fetch_model(
    name: str,
    revision: str = "",
    *,
    prefer_cache: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> list[Path]:
    """Returns the files that `name` means; downloads what the cache lacks. name: must match HUB_NAME.

    prefer_cache: if the cache has all of them, use those without asking the hub for newer ones.
    Raises GgufError when the repository has no such files, and HubError when it cannot be reached.
    """
    if prefer_cache:
        with suppress(GgufError):  # the cache may lack the files that `name` means
            files = _fetched(name, revision, True, on_progress)
            if all(file.exists() for file in files):
                return files
    return _fetched(name, revision, False, on_progress)


def _fetched(name: str, revision: str, prefer_cache: bool, on_progress: Progress) -> list[Path]:
    repository, model = _model(name, revision, prefer_cache)
    folder = fetch(
        repository, model, revision=revision, prefer_cache=prefer_cache, ignored=(), on_progress=on_progress
    )  # fmt: skip
    return [folder / file for file in model]


def fetch_text(name: str, revision: str = "") -> Path:
    """Returns a folder with what a frontend needs, tokenizer and configuration, of the model that `name` means.

    Downloads only the beginning of its first file, so that a frontend need not wait for the weights. Raises as
    `fetch_model` does.
    """
    repository, model = _model(name, revision, prefer_cache=False)
    file = cached_file(repository, model[0], revision=revision)
    if file is None:
        file = fetch_beginning(repository, model[0], BEGINNING, _writable_cache(), revision=revision)
    try:
        return translated([file], only_text=True)
    except GgufError:  # the file is broken, or its metadata is longer
        return translated(fetch_model(name, revision), only_text=True)


def _model(name: str, revision: str, prefer_cache: bool) -> tuple[str, Model]:
    """Returns the repository and the names of the files."""
    found = HUB_NAME.fullmatch(name)
    assert found is not None
    names = file_names(found["repository"], revision=revision, prefer_cache=prefer_cache)
    return found["repository"], chosen(found["repository"], names, found["wanted"])


def _writable_cache() -> Path:
    try:
        return gguf_cache()
    except OSError:
        return temporary_folder()


def check_not_only_gguf(repository: str, revision: str = "") -> list[str]:
    """Returns the names of a repository's files.

    Raises GgufError that lists the quantizations if the weights are GGUF files.
    """
    names = file_names(repository, revision=revision)
    if models := models_among(names):
        raise GgufError(
            f"{repository!r} has GGUF files, so say which: {repository}:NAME, where NAME is one of {listed(models)}"
        )
    return names
