"""Finds out what a checkpoint is for (text, embeddings or scores), and how its hidden states become a vector.

Frontends and workers read this from the same files: config.json and the files of sentence-transformers (modules.json,
the config of its pooling module, config_sentence_transformers.json).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shared.messages import PoolingKind

TaskName = Literal["generate", "embed", "score"]
# endings of the names of classes that compute scores, and of classes that compute embeddings
CLASSIFIER, HEADLESS = "ForSequenceClassification", "Model"
POOLING_MODES = {"lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN, "cls": PoolingKind.FIRST}
MODULES = ("Transformer", "Pooling", "Normalize")


class TaskError(ValueError):
    """The checkpoint cannot be served for the task. The message is one sentence that names the file or the flag."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a server does with its model.

    pooling, normalized: how a prompt becomes an embedding
    labels: the number of rows of the scoring head; 0: the score is made of the logits of "yes" and "no"
    prompts: texts to put before an input, by name; default_prompt: the name of the text for requests that name none
    """

    name: TaskName = "generate"
    pooling: PoolingKind = PoolingKind.LAST
    normalized: bool = True
    labels: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""


GENERATE = Task()


def read_task(folder: Path, wanted: str = "auto") -> Task:
    """Returns the task that the checkpoint in `folder` is served for.

    wanted: --task. With `auto` the files of the checkpoint decide; if they do not say, the task is text generation.
    Raises TaskError when the checkpoint cannot do the wanted task, or one of its files is broken.
    """
    config = _json(folder / "config.json", dict) or {}
    settings = _json(folder / "config_sentence_transformers.json", dict) or {}
    modules = _json(folder / "modules.json", list)
    says = _said(config, settings, modules)
    name = (says or "generate") if wanted == "auto" else wanted
    classes = ", ".join(config.get("architectures") or ())
    if says == "score" and name != "score" and classes.endswith(CLASSIFIER):
        raise TaskError(f"--task {name}: {folder} is a classifier ({classes}), which serves --task score")
    if says == "embed" and name == "score":
        raise TaskError(f"--task score: {folder} is an embedding model; with --task embed a score is a cosine")
    match name:
        case "embed":
            return _embedding(folder, settings, modules)
        case "score":
            return Task("score", labels=_labels(folder, config) if classes.endswith(CLASSIFIER) else 0)
        case _:
            return GENERATE


def _said(config: Mapping[str, Any], settings: Mapping[str, Any], modules: Sequence[Any] | None) -> str:
    """Returns the task that the files name, or ""."""
    classes = config.get("architectures") or ()
    if settings.get("model_type") == "CrossEncoder" or any(name.endswith(CLASSIFIER) for name in classes):
        return "score"
    if modules is not None or any(name.endswith(HEADLESS) for name in classes):
        return "embed"
    return ""


def _labels(folder: Path, config: Mapping[str, Any]) -> int:
    stated = config.get("num_labels")
    # transformers writes no id2label for two labels, its default
    labels = len(config.get("id2label") or (0, 1)) if stated is None else stated
    if labels != 1:
        raise TaskError(f"{folder / 'config.json'}: a classifier with {labels} labels is not supported; supported is 1")
    return 1


def _embedding(folder: Path, settings: Mapping[str, Any], modules: Sequence[Any] | None) -> Task:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise TaskError(f"{folder / 'config_sentence_transformers.json'}: there is no prompt {default!r}")
    if modules is None:
        return Task("embed", prompts=prompts, default_prompt=default)
    pooling, normalized = PoolingKind.LAST, False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in MODULES:
            raise TaskError(
                f"{folder / 'modules.json'}: module {kind!r} is not supported; supported are {', '.join(MODULES)}"
            )
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        normalized = normalized or kind == "Normalize"
    return Task("embed", pooling, normalized, prompts=prompts, default_prompt=default)


def _pooling(path: Path) -> PoolingKind:
    config = _json(path, dict)
    if config is None:
        raise TaskError(f"{path} is missing")
    stated = config.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, on in config.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    modes = [stated] if isinstance(stated, str) else [str(mode) for mode in stated]
    if len(modes) != 1 or modes[0] not in POOLING_MODES:
        shown = " and ".join(modes) or "none"
        raise TaskError(f"{path}: pooling {shown} is not supported; supported is one of {', '.join(POOLING_MODES)}")
    if config.get("include_prompt") is False and modes[0] != "lasttoken":
        raise TaskError(f"{path}: include_prompt false is not supported; supported is true")
    return POOLING_MODES[modes[0]]


def _json(path: Path, kind: type) -> Any:
    """Returns the parsed JSON of the file, or None if there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise TaskError(f"{path} must hold a JSON {'object' if kind is dict else 'array'}")
    return value


# The alphabet of byte-level vocabularies, which GPT-2 introduced: a printable character stands for each byte.


def _alphabet() -> dict[str, int]:
    """Visible Latin-1 characters stand for themselves; the characters from U+0100 on stand for the other bytes."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


BYTES: Mapping[str, int] = _alphabet()  # character → the byte that it stands for
_CHARS = {byte: char for char, byte in BYTES.items()}


def spelled(text: str) -> str:
    """Returns how a byte-level vocabulary spells a text."""
    return "".join([_CHARS[byte] for byte in text.encode()])
