"""The text-related files of a Hugging Face checkpoint: tokenizer, special tokens, chat templates, eos ids.

This module only reads and checks the files; `tokenizer` encodes and decodes.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from frontend.text.chat_template import given_template
from shared.checkpoint import Task, TaskError, read_task

if TYPE_CHECKING:
    from frontend.text.image_format import ImageFormat

log = logging.getLogger("sluice.frontend")

Settings = dict[str, Any]


class TokenizerError(Exception):
    """The folder's tokenizer cannot be used. The message is one sentence for the operator who starts the server."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens become text.

    kind: "bytes" (byte-level), "fallback" (byte fallback) or "other"
    strip: for "fallback": how many leading spaces are dropped
    """

    kind: str
    strip: int = 0


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The combined contents of a checkpoint's text-related files."""

    folder: Path
    data: bytes  # the content of tokenizer.json
    engine: Engine  # the library's tokenizer, which neither truncates nor pads
    decoding: Decoding
    templates: dict[str, str]  # chat template sources by name
    named_tokens: dict[str, str]  # the texts of special tokens by name ("bos_token", ...)
    eos_ids: tuple[int, ...]
    generation: Settings  # the content of generation_config.json
    task: Task
    image_format: "ImageFormat | None" = None

    @classmethod
    def read(cls, folder: Path, template: str = "", task: str = "auto") -> Self:
        """Reads the folder. Only tokenizer.json is required.

        template: a file that replaces all chat templates of the folder
        task: what to serve the checkpoint for, see `shared.checkpoint.read_task`

        Raises TokenizerError saying what is missing or broken; ConfigError for a `template` that cannot be used.
        """
        data, engine, decoding = read_engine(folder / "tokenizer.json")
        config = read_settings(folder / "tokenizer_config.json")
        names = named_tokens(config, read_settings(folder / "special_tokens_map.json"))
        model = read_settings(folder / "config.json")
        generation = read_settings(folder / "generation_config.json")
        inner = model.get("text_config")
        text_model = inner if isinstance(inner, dict) else {}
        settings = [generation, model, text_model]
        for name in ("bos", "eos"):
            token = next(iter(first_ids(f"{name}_token_id", settings)), None)
            if token is not None and (text := engine.id_to_token(token)):
                names.setdefault(f"{name}_token", text)
        engine.add_special_tokens(missing_specials(engine, config, names))
        eos_ids = first_ids("eos_token_id", settings) or ids_of(engine.token_to_id(names.get("eos_token", "")))
        templates = given_template(Path(template)) if template else chat_templates(folder, config)
        check_vocabulary(engine, (text_model or model).get("vocab_size"), templates, folder)
        served = _task(folder, task)
        image_format = None
        if model.get("vision_config") and served.name == "generate":
            from frontend.text.image_format import read_image_format

            image_format = read_image_format(folder, model, names)
        return cls(folder, data, engine, decoding, templates, names, eos_ids, generation, served, image_format)


def _task(folder: Path, wanted: str) -> Task:
    try:
        return read_task(folder, wanted)
    except TaskError as exc:
        raise TokenizerError(str(exc)) from exc


class _File(msgspec.Struct):
    """The one field of tokenizer.json that is read here; the library reads all fields."""

    decoder: Settings | None = None


def read_text(path: Path) -> str | None:
    """Returns the file's text, or None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise TokenizerError(f"{path} cannot be read: {exc}") from exc


def read_settings(path: Path) -> Settings:
    """Returns the file's JSON object, empty if there is no such file."""
    text = read_text(path)
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise TokenizerError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return settings


def read_engine(path: Path) -> tuple[bytes, Engine, Decoding]:
    """Reads tokenizer.json. Returns its bytes, the library's tokenizer (no truncation or padding), and its decoding."""
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise TokenizerError(f"{path.parent} has no tokenizer.json; convert the model's tokenizer first") from None
    except OSError as exc:
        raise TokenizerError(f"{path} cannot be read: {exc}") from exc
    try:
        engine = Engine.from_buffer(source)
        decoder = msgspec.json.decode(source, type=_File).decoder
    except (ValueError, RecursionError) as exc:
        raise TokenizerError(f"{path} is not a tokenizer: {exc}") from exc
    engine.no_truncation()
    engine.no_padding()
    _try(engine, path)
    return source, engine, decoding_of(decoder)


def _try(engine: Engine, path: Path) -> None:
    """Raises TokenizerError if the tokenizer cannot encode: its post-processor may name a token that it lacks."""
    try:
        engine.encode("")
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # the library's own class, no Exception, which no module exports
            raise
        raise TokenizerError(f"{path} is not a tokenizer: it cannot encode a text: {exc}") from exc


def check_vocabulary(engine: Engine, size: object, templates: dict[str, str], folder: Path) -> None:
    """Raises TokenizerError if texts have ids that the model lacks: the tokenizer is that of another model.

    size: the model's vocab_size; anything but a number is not checked

    Added tokens beyond the vocabulary are common, because trainers add tokens such as [PAD] without a larger model. If
    no text gets them by itself, they are only logged, and a request that needs one is refused.
    """
    if not isinstance(size, int):
        return
    file, words = folder / "tokenizer.json", f"the model's vocab_size is {size}"
    if (count := engine.get_vocab_size(with_added_tokens=False)) > size:
        raise TokenizerError(f"{file} has {count} tokens for text, but {words}: it is the tokenizer of another model")
    if beyond := [id for id in engine.encode("").ids if id >= size]:
        token = engine.id_to_token(beyond[0])
        raise TokenizerError(f"{file} adds the token {token!r} to each text, whose id is {beyond[0]}, but {words}")
    added = {id: one.content for id, one in engine.get_added_tokens_decoder().items() if id >= size}
    if added:
        shown = ", ".join(f"{text!r} ({id})" for id, text in sorted(added.items())[:8])
        log.warning("%s: %d added tokens are outside the vocabulary (%s); %s", file, len(added), shown, words)
    if written := [text for text in added.values() if any(text in source for source in templates.values())]:
        log.warning("chats are refused where the chat template writes %s, which the model lacks", ", ".join(written))


def decoding_of(decoder: Settings | None) -> Decoding:
    """Recognizes the two decoders that decode token by token; any other decoder needs WindowText."""
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return Decoding("bytes")
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        }:
            return _fallback(rest)
    return Decoding("other")


def _fallback(rest: list[Settings]) -> Decoding:
    match rest:
        case []:
            return Decoding("fallback")
        case [{"type": "Strip", "content": " ", "start": start, "stop": 0}]:
            return Decoding("fallback", strip=start)
    return Decoding("other")


def named_tokens(*settings: Settings) -> dict[str, str]:
    """Returns the texts of `bos_token`, `eos_token`, ... by name; earlier settings take precedence."""
    names: dict[str, str] = {}
    for each in settings:
        for name, value in each.items():
            text = token_text(value)
            if name.endswith("_token") and text is not None:
                names.setdefault(name, text)
    return names


def token_text(value: object) -> str | None:
    """Returns the text of a token that is a string or an object with `content`; None for anything else."""
    match value:
        case str(text) | {"content": str(text)}:
            return text
    return None


def missing_specials(engine: Engine, config: Settings, names: dict[str, str]) -> list[AddedToken]:
    """Returns the special tokens of tokenizer_config.json that are in the vocabulary, but are not added tokens of
    tokenizer.json.

    tokenizer.json decides whether an added token is special, as with transformers.
    """
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    texts = {*names.values(), *(text for text in map(token_text, listed) if text)}
    known = {entry.content for entry in engine.get_added_tokens_decoder().values()}
    missing = sorted(text for text in texts - known if engine.token_to_id(text) is not None)
    return [AddedToken(text, special=True, normalized=False) for text in missing]


def chat_templates(folder: Path, config: Settings) -> dict[str, str]:
    """Returns the sources of chat templates by name; separate files take precedence over tokenizer_config.json."""
    templates = _listed(config.get("chat_template"), folder / "tokenizer_config.json")
    own = folder / "chat_template.json"
    templates |= _listed(read_settings(own).get("chat_template"), own)
    source = read_text(folder / "chat_template.jinja")
    if source is not None:
        templates["default"] = source
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path) or ""
    return templates


def _listed(value: object, file: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str(source):
            return {"default": source}
        case list(entries):
            return dict(_entry(entry, file) for entry in entries)
        case dict(entries):
            return {str(name): str(source) for name, source in entries.items()}
    raise TokenizerError(f"{file}: chat_template must be a text or a list of named texts")


def _entry(entry: object, file: Path) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(source)}:
            return name, source
    raise TokenizerError(f"{file}: each entry of chat_template needs a name and a template")


def ids_of(value: object) -> tuple[int, ...]:
    """Returns the ids in `eos_token_id` and similar settings: one, several, or none."""
    match value:
        case int(token) if token >= 0:
            return (token,)
        case list(tokens):
            return tuple(token for each in tokens for token in ids_of(each))
    return ()


def first_ids(name: str, settings: list[Settings]) -> tuple[int, ...]:
    """Returns the ids under `name` in the first of the settings that has any."""
    return next((ids for each in settings if (ids := ids_of(each.get(name)))), ())
