"""Fetches the GGUF files that `org/repository:NAME` means, and no others, from the Hugging Face hub."""

from pathlib import Path

from shared.gguf.errors import GgufError
from shared.gguf.naming import HUB_NAME, chosen, listed, models_among
from shared.hf_hub import Progress, fetch, file_names


def fetch_model(
    name: str,
    revision: str = "",
    *,
    prefer_cache: bool = False,
    on_progress: Progress = lambda done, total: None,
) -> list[Path]:
    """Returns the files that `name` means; downloads what the cache lacks. name: must match HUB_NAME.

    prefer_cache: use cached files without asking the hub for newer ones.
    Raises GgufError when the repository has no such files, and HubError when it cannot be reached.
    """
    found = HUB_NAME.fullmatch(name)
    assert found is not None
    repository = found["repository"]
    names = file_names(repository, revision=revision, prefer_cache=prefer_cache)
    model = chosen(repository, names, found["wanted"])
    folder = fetch(
        repository, model, revision=revision, prefer_cache=prefer_cache, ignored=(), on_progress=on_progress
    )  # fmt: skip
    return [folder / name for name in model]


def check_not_only_gguf(repository: str, revision: str = "") -> None:
    """Raises GgufError that lists the quantizations if the weights of a repository are GGUF files."""
    if models := models_among(file_names(repository, revision=revision)):
        raise GgufError(
            f"{repository!r} has GGUF files, so say which: {repository}:NAME, where NAME is one of {listed(models)}"
        )
