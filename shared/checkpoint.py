"""Finds out what a checkpoint is for (text, embeddings or scores), and how its hidden states become a vector.

Frontends and workers read this from the same files: config.json and the files of sentence-transformers (modules.json,
the config of its pooling module, config_sentence_transformers.json).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shared.messages import PoolingKind

TaskName = Literal["generate", "embed", "score"]
# endings of the names of classes that compute scores, and of classes that compute embeddings
CLASSIFIER, HEADLESS = "ForSequenceClassification", "Model"
POOLING_MODES = {
    "lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN, "cls": PoolingKind.FIRST, "max": PoolingKind.MAX,
}  # fmt: skip
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# The model types of encoders. worker/encoder/families.py has a row for each.
ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "nomic_bert", "modernbert"})
MAX_TOKENS = 1 << 27  # no text is longer
MAX_LABELS, MAX_LABEL_CHARS, MAX_DENSE = 1024, 200, 1 << 20
DENSE_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}


class TaskError(ValueError):
    """The checkpoint cannot be served for the task. The message is one sentence that names the file or the flag."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear after pooling: a module `Dense` of sentence-transformers. folder: its path in the checkpoint"""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str  # identity, tanh, relu or gelu; another name is that of an unsupported class


@dataclass(frozen=True, slots=True)
class Task:
    """What a server does with its model.

    pooling, normalized: how a prompt becomes an embedding
    labels: the number of rows of the scoring head; 0: the score is made of the logits of "yes" and "no"
    prompts: texts to put before an input, by name; default_prompt: the name of the text for requests that name none
    encoder: whether the model computes whole texts, in both directions
    most_tokens: the longest text that the checkpoint allows, in tokens; 0: as many as the model has positions
    lower: whether texts are put into lower case before they are tokenized
    dense: linears that are applied to pooled vectors
    label_names: the names of the labels, in their order; empty: the checkpoint names none
    multi_label: whether several labels may be true of a text
    """

    name: TaskName = "generate"
    pooling: PoolingKind = PoolingKind.LAST
    normalized: bool = True
    labels: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    encoder: bool = False
    most_tokens: int = 0
    lower: bool = False
    dense: tuple[Dense, ...] = ()
    label_names: tuple[str, ...] = ()
    multi_label: bool = False


GENERATE = Task()


def is_bidirectional(config: Mapping[str, Any]) -> bool:
    """Whether the config.json is that of a decoder that attends in both directions."""
    inner = config.get("text_config")
    settings = {**config, **(inner if isinstance(inner, dict) else {})}
    return settings.get("use_bidirectional_attention") in (True, "all") or settings.get("is_causal") is False


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the config.json is that of an encoder, which computes whole texts, in both directions."""
    return str(config.get("model_type")) in ENCODERS or is_bidirectional(config)


def read_task(folder: Path, wanted: str = "auto") -> Task:
    """Returns the task that the checkpoint in `folder` is served for.

    wanted: --task. With `auto` the files of the checkpoint decide; if they do not say, the task is text generation.
    Raises TaskError when the checkpoint cannot do the wanted task, or one of its files is broken.
    """
    config = _json(folder / "config.json", dict) or {}
    settings = _json(folder / "config_sentence_transformers.json", dict) or {}
    modules = _json(folder / "modules.json", list)
    encoder = is_encoder(config)
    says = _said(config, settings, modules) or ("embed" if encoder else "")
    name = (says or "generate") if wanted == "auto" else wanted
    classes = ", ".join(_classes(config))
    if says == "score" and name != "score" and classes.endswith(CLASSIFIER):
        raise TaskError(f"--task {name}: {folder} is a classifier ({classes}), which serves --task score")
    if says == "embed" and name == "score":
        raise TaskError(f"--task score: {folder} is an embedding model; with --task embed a score is a cosine")
    if encoder and name == "generate":
        raise TaskError(
            f"--task generate: {folder} is an encoder ({config.get('model_type')}), which generates no text"
        )
    limits = _limits(folder) if encoder else {}
    match name:
        case "embed":
            return replace(_embedding(folder, settings, modules, encoder=encoder), **limits)
        case "score":
            labels = _labels(folder, config, encoder=encoder) if classes.endswith(CLASSIFIER) else 0
            if encoder and not labels:
                raise TaskError(f"--task score: {folder} is an encoder without a classification head ({classes})")
            names = _label_names(config, labels) if labels else ()
            several = config.get("problem_type") == "multi_label_classification"
            return Task("score", labels=labels, encoder=encoder, label_names=names, multi_label=several, **limits)
        case _:
            return GENERATE


def _limits(folder: Path) -> dict[str, Any]:
    """Returns the fields of a Task that say how texts are prepared, from sentence_bert_config.json."""
    path = folder / "sentence_bert_config.json"
    settings = _json(path, dict) or {}
    most, lower = settings.get("max_seq_length"), settings.get("do_lower_case", False)
    if most is not None and not (type(most) is int and 0 < most <= MAX_TOKENS):
        raise TaskError(f"{path}: max_seq_length {most!r:.80} is not supported; it is a number of tokens")
    if type(lower) is not bool:
        raise TaskError(f"{path}: do_lower_case {lower!r:.80} is not supported; it is true or false")
    return {"most_tokens": most or 0, "lower": lower}


def _said(config: Mapping[str, Any], settings: Mapping[str, Any], modules: Sequence[Any] | None) -> str:
    """Returns the task that the files name, or ""."""
    classes = _classes(config)
    if settings.get("model_type") == "CrossEncoder" or any(name.endswith(CLASSIFIER) for name in classes):
        return "score"
    if modules is not None or any(name.endswith(HEADLESS) for name in classes):
        return "embed"
    return ""


def _classes(config: Mapping[str, Any]) -> list[str]:
    """Returns the names of classes in `architectures`. What else stands there, the model's settings refuse by name."""
    stated = config.get("architectures")
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []


def _labels(folder: Path, config: Mapping[str, Any], *, encoder: bool) -> int:
    stated, named = config.get("num_labels"), config.get("id2label") or {}
    if not isinstance(named, dict):
        raise TaskError(f"{folder / 'config.json'}: id2label {named!r:.80} is not supported; it is an object")
    # transformers writes no id2label for two labels, its default
    labels = len(named or (0, 1)) if stated is None else stated
    if type(labels) is not int or not 1 <= labels <= (MAX_LABELS if encoder else 1):
        most = f"supported are 1 to {MAX_LABELS}" if encoder else "supported is 1"
        raise TaskError(f"{folder / 'config.json'}: a classifier with {labels} labels is not supported; {most}")
    return labels


def _label_names(config: Mapping[str, Any], labels: int) -> tuple[str, ...]:
    """Returns the names of the labels; nothing if the config has only the names that transformers gives by itself."""
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    plain = tuple(f"LABEL_{i}" for i in range(labels))
    names = tuple(str(named.get(str(i), one))[:MAX_LABEL_CHARS] for i, one in enumerate(plain))
    return () if names == plain else names


def _embedding(
    folder: Path, settings: Mapping[str, Any], modules: Sequence[Any] | None, *, encoder: bool = False
) -> Task:
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name") or ""
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise TaskError(f"{folder / 'config_sentence_transformers.json'}: prompts is not an object of texts")
    if default and str(default) not in prompts:
        raise TaskError(f"{folder / 'config_sentence_transformers.json'}: there is no prompt {default!r}")
    if modules is None:  # sentence-transformers adds the mean where a folder states nothing
        bare = PoolingKind.MEAN if encoder else PoolingKind.LAST
        return Task("embed", bare, prompts=prompts, default_prompt=default, encoder=encoder)
    pooling, normalized, dense = PoolingKind.LAST, False, list[Dense]()
    supported = MODULES if encoder else [one for one in MODULES if one != "Dense"]
    for module in modules:
        if not isinstance(module, dict):
            raise TaskError(f"{folder / 'modules.json'}: {module!r:.80} is not a module, which is an object")
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in supported:
            raise TaskError(
                f"{folder / 'modules.json'}: module {kind!r} is not supported; supported are {', '.join(supported)}"
            )
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        if kind == "Dense":
            dense.append(_dense(folder, module.get("path", "")))
        if normalized:
            raise TaskError(f"{folder / 'modules.json'}: module {kind!r} after Normalize is not supported")
        normalized = kind == "Normalize"
    return Task(
        "embed", pooling, normalized, prompts=prompts, default_prompt=default, encoder=encoder, dense=tuple(dense)
    )


def _dense(folder: Path, path: object) -> Dense:
    """Reads the config of a module `Dense`. A path that leads out of the checkpoint's folder is refused."""
    if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/"):
        raise TaskError(f"{folder / 'modules.json'}: the path {path!r:.80} is not a folder in the checkpoint")
    file = folder / path / "config.json"
    config = _json(file, dict)
    if config is None:
        raise TaskError(f"{file} is missing")
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    for name, size in zip(("in_features", "out_features"), sizes, strict=True):
        if type(size) is not int or not 0 < size <= MAX_DENSE:
            raise TaskError(f"{file}: {name} {size!r:.80} is not supported; supported are numbers up to {MAX_DENSE}")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    activation = DENSE_ACTIVATIONS.get(activation, activation)
    return Dense(path, sizes[0], sizes[1], config.get("bias", True) is True, activation)


def _pooling(path: Path) -> PoolingKind:
    config = _json(path, dict)
    if config is None:
        raise TaskError(f"{path} is missing")
    stated = config.get("pooling_mode") or [
        name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
        for name, on in config.items()
        if name.startswith("pooling_mode_") and on is True
    ]
    modes = [str(mode) for mode in stated] if isinstance(stated, list) else [str(stated)]
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
    except (OSError, ValueError, RecursionError) as error:
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
