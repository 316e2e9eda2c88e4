"""Reads the files of a PEFT adapter: for each module two matrices A and B, and the scale of their product.

The output of a module with the weight W becomes W x + scale * B (A x), where scale is lora_alpha / r, or
lora_alpha / sqrt(r) with use_rslora. rank_pattern and alpha_pattern give some modules other values. An option that
changes the formula is refused by name (https://huggingface.co/docs/peft/package_reference/lora).
"""

import hashlib
import json
import math
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.log import on_one_line
from shared.sandbox import Lost, NotStarted, Raised, Sandbox

# Reads and hashes the files of an adapter: two files in a PEFT folder, or one GGUF file. Does not know what the files
# mean.
#
# The hash identifies the adapter: after a change of its files, it is another adapter under the same name.

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
GGUF = ".gguf"  # how the name of a GGUF file ends
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30


class AdapterError(ValueError):
    """An adapter cannot be used; the message is one sentence that names the file or the unsupported feature."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The bytes of an adapter's files, read once, so that hash and content belong together.

    config: None for a GGUF file, all of whose bytes are `weights`
    """

    config: bytes | None
    weights: bytes

    @property
    def is_gguf(self) -> bool:
        return self.config is None

    @property
    def sha256(self) -> str:
        """The hash of the adapter, which is a hash over the hashes of its files."""
        contents = [content for content in (self.config, self.weights) if content is not None]
        each = [hashlib.sha256(content).digest() for content in contents]
        return hashlib.sha256(b"".join(each)).hexdigest()


def read_files(location: str, *, mapped: bool = False) -> AdapterFiles:
    """Reads an adapter's folder, or its GGUF file. Raises AdapterError.

    mapped: maps the weights, so that they take no memory of their own. The file may then change between two looks, so
        this is only for describing an adapter, whose hash is checked when it is loaded.
    """
    path = Path(location)
    read_weights = _mapped if mapped else _read
    if path.suffix.lower() == GGUF and not path.is_dir():
        return AdapterFiles(None, read_weights(path, MAX_WEIGHTS_BYTES))
    if not path.is_dir():
        raise AdapterError(f"{location} is not a folder with {CONFIG} and {WEIGHTS}, nor a {GGUF} file")
    if not (path / WEIGHTS).exists() and (path / PICKLED).exists():
        raise AdapterError(
            f"{path / PICKLED} is a pickle, which may run any program when it is read: save it as {WEIGHTS}"
        )
    return AdapterFiles(_read(path / CONFIG, MAX_CONFIG_BYTES), read_weights(path / WEIGHTS, MAX_WEIGHTS_BYTES))


def _mapped(file: Path, most: int) -> bytes:
    if not file.is_file() or not 0 < file.stat().st_size <= most:
        return _read(file, most)
    try:
        with file.open("rb") as opened:
            # a map has the methods of bytes that readers of adapters use: length, slices, buffer
            return cast(bytes, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error


def size_of(location: str) -> int:
    """Returns about how many bytes `read_files` reads; 0 if there is nothing to read."""
    path = Path(location)
    try:
        return min((path / WEIGHTS if path.is_dir() else path).stat().st_size, MAX_WEIGHTS_BYTES)
    except (OSError, ValueError):
        return 0


def _read(file: Path, most: int) -> bytes:
    try:
        if not file.is_file():
            raise AdapterError(f"{file} is missing")
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise AdapterError(f"{file} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise AdapterError(f"{file} has more than {most} bytes")
    return content


MAX_HEADER_BYTES = 16 << 20
DTYPES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a value of this dtype
# names of tensors: module, matrix, and the name of the adapter, which PEFT sometimes leaves in the name
FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
# options that can change the formula → their values that do not change it
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "modules_to_save": (None, []), "bias": (None, "none"), "lora_bias": (None, False),
    "fan_in_fan_out": (None, False), "use_qalora": (None, False), "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}), "alora_invocation_tokens": (None, []),
    "megatron_config": (None,), "arrow_config": (None,), "use_bdlora": (None, False),
}  # fmt: skip
# endings of the names of modules with the weights of all experts
EXPERTS, INNER = ".experts", ".base_layer"
STACKED = ("gate_up_proj", "down_proj")  # parameters with all experts' weights, in the order in which PEFT wraps them


@dataclass(frozen=True, slots=True)
class StoredFactor:
    """Where and how the weights file stores a matrix. dtype: a key of DTYPES, or Q8_0 in a GGUF file."""

    dtype: str
    shape: tuple[int, int]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """The low-rank product of a module. a: [rank, inputs]; b: [outputs, rank].

    experts: the number of experts whose products are stored together, with a: [experts * rank, inputs] and
        b: [outputs, rank * experts]; 0: the module is a single linear
    """

    a: StoredFactor
    b: StoredFactor
    scale: float
    experts: int = 0

    @property
    def rank(self) -> int:
        return self.a.shape[0] // max(self.experts, 1)


def low_rank_modules(files: AdapterFiles, max_rank: int = 0) -> dict[str, LowRank]:
    """Returns the products by module, named as in the base model. Raises AdapterError.

    The product for all experts of a layer is listed under the parameter that holds the weights of all experts.
    max_rank: the highest rank that is accepted; 0: any
    """
    config, header = _config(files.config or b""), _header(files.weights)
    factors: dict[str, dict[str, StoredFactor]] = {}
    for name, factor in header.items():
        matched = FACTOR.fullmatch(name)
        if matched is None:
            shown = on_one_line(name)
            raise AdapterError(f"{WEIGHTS} has the tensor {shown!r}, which is not the A or B of a LoRA on a linear")
        module, which = _with_parameter(matched["module"], config["target_parameters"]), matched["which"]
        if which in factors.setdefault(module, {}):  # one may have the prefix of PEFT or the name of its adapter
            raise AdapterError(f"{WEIGHTS} has two tensors for lora_{which} of {on_one_line(module)}")
        factors[module][which] = factor
    if not factors:
        raise AdapterError(f"{WEIGHTS} has no tensors")
    ranks = _values(config, "rank_pattern", "r", [*factors])
    alphas = _values(config, "alpha_pattern", "lora_alpha", [*factors])
    rooted = bool(config.get("use_rslora"))
    return {name: _low_rank(name, pair, ranks[name], alphas[name], rooted, max_rank) for name, pair in factors.items()}


def _low_rank(
    module: str, pair: dict[str, StoredFactor], rank: float, alpha: float, rooted: bool, max_rank: int
) -> LowRank:
    if len(pair) < 2:
        raise AdapterError(f"{WEIGHTS} has only one of lora_A and lora_B of {module}")
    a, b = pair["A"], pair["B"]
    experts = a.shape[0] // rank if module.endswith(tuple(f"{EXPERTS}.{name}" for name in STACKED)) else 0
    if not a.shape[0] == b.shape[1] == max(experts, 1) * rank:
        raise AdapterError(
            f"{module}: lora_A is {[*a.shape]} and lora_B {[*b.shape]}, but {CONFIG} gives it the rank {rank:g}"
        )
    if max_rank and rank > max_rank:
        raise AdapterError(f"{module} has the rank {rank:g}, above --max-lora-rank {max_rank}")
    return LowRank(a, b, alpha / (math.sqrt(rank) if rooted else rank), int(experts))


def _with_parameter(module: str, parameters: list[str]) -> str:
    """Returns the parameter's name for a product of all experts of a layer; returns other names unchanged."""
    experts = module.removesuffix(INNER)
    if not parameters or not experts.endswith(EXPERTS):
        return module
    inner = experts != module
    return f"{experts}.{parameters[0 if inner else -1]}"


def _values(config: dict[str, Any], pattern: str, default: str, modules: list[str]) -> dict[str, float]:
    """Returns module → value: of the first pattern that matches the end of the module's name, else the default."""
    given = config[pattern]
    values = [*(_number(value, pattern) for value in given.values()), config[default]]
    return {module: values[i] for module, i in zip(modules, first_matches(pattern, [*given], modules), strict=True)}


def _config(content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{CONFIG} is not an object")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG}: peft_type {str(config.get('peft_type'))[:80]!r} is not supported, only LORA")
    for key, harmless in UNSUPPORTED.items():
        if config.get(key) not in harmless:
            raise AdapterError(f"{CONFIG}: {key} {str(config[key])[:80]} is not supported")
    config["target_parameters"] = _parameters(config.get("target_parameters") or [])
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = config.get(key) or {}
        if not isinstance(config[key], dict) or len(config[key]) > 10_000:
            raise AdapterError(f"{CONFIG}: {key} is not an object of at most 10000 entries")
    for key in ("r", "lora_alpha"):
        config[key] = _number(config.get(key), key)
    if config.get("use_rslora") not in (None, True, False):
        raise AdapterError(f"{CONFIG}: use_rslora must be true or false, not {str(config['use_rslora'])[:80]}")
    return config


def _parameters(names: Any) -> list[str]:
    """Returns the parameters of STACKED that an adapter changes."""
    ends = {str(name).rpartition(".")[2] for name in names} if isinstance(names, list) else {str(names)}
    if ends - {*STACKED}:
        raise AdapterError(
            f"{CONFIG}: target_parameters {str(names)[:80]} is not supported, only experts' {' and '.join(STACKED)}"
        )
    return [name for name in STACKED if name in ends]


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise AdapterError(f"{CONFIG}: {key} must be a positive number, not {str(value)[:80]}")
    return value


def _header(content: bytes) -> dict[str, StoredFactor]:
    """Returns the tensors of a safetensors file. Checks that the file holds all their bytes."""
    size = 8 + int.from_bytes(content[:8], "little")
    if size > min(len(content), MAX_HEADER_BYTES) or len(content) < 8:
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file")
    try:
        entries = json.loads(content[8:size])
        entries.pop("__metadata__", None)
        found = {name: _factor(on_one_line(name), entry, size, len(content)) for name, entry in entries.items()}
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file") from None
    check_apart(found, WEIGHTS)
    return found


def check_apart(tensors: Mapping[str, StoredFactor], file: str) -> None:
    """Raises AdapterError if two tensors have bytes in common: one of them has the wrong place. file: for the error"""
    last, end = "", 0
    for name, tensor in sorted(tensors.items(), key=lambda one: one[1].begin):
        if tensor.begin < end:
            raise AdapterError(f"{file} has the tensors {on_one_line(last)} and {on_one_line(name)}, which overlap")
        last, end = name, tensor.end


def _factor(name: str, entry: dict[str, Any], begin: int, end: int) -> StoredFactor:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise AdapterError(f"{WEIGHTS}: {name} is in {str(dtype)[:20]}; supported are {', '.join(DTYPES)}")
    if len(shape) != 2 or not all(isinstance(n, int) and n > 0 for n in shape):
        raise AdapterError(f"{WEIGHTS}: {name} has the shape {[*shape]}, which is not that of a LoRA on a linear")
    whole = isinstance(first, int) and isinstance(last, int)
    if not whole or not 0 <= first <= last <= end - begin or last - first != math.prod(shape) * DTYPES[dtype]:
        raise AdapterError(f"{WEIGHTS} is not a complete safetensors file")
    return StoredFactor(dtype, (shape[0], shape[1]), begin + first, begin + last)


# Adapters with a name and a folder, as `--lora-modules` and the route that loads an adapter state them.

MAX_NAME_CHARS = 256  # limit on an adapter's name, which requests state as their `model`
FLAG = "--lora-modules"
JSON_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """name: the name in requests. path: the adapter's folder. base: the base model's name; empty: the served model."""

    name: str
    path: str
    base: str = ""


def named_adapters(model: ModelConfig) -> tuple[NamedAdapter, ...]:
    """Returns the adapters of --lora-modules. Raises ConfigError."""
    found = tuple(_each(model.lora_modules))
    names = [adapter.name for adapter in found]
    for adapter in found:
        if problem := name_problem(adapter.name):
            raise ConfigError(f"{FLAG}: the name {adapter.name[:MAX_NAME_CHARS]!r} {problem}")
        if names.count(adapter.name) > 1 or adapter.name in model.names:
            raise ConfigError(f"{FLAG}: the name {adapter.name!r} is given twice, or is that of the base model")
        if adapter.base and adapter.base not in model.names:
            raise ConfigError(
                f"{FLAG}: base_model_name {adapter.base!r} of {adapter.name!r} is not served; "
                f"the base is {model.name!r}"
            )
    return found


def name_problem(name: str) -> str:
    """Returns what is wrong with the name of an adapter; empty if nothing is wrong."""
    if not name or len(name) > MAX_NAME_CHARS:
        return f"must have 1 to {MAX_NAME_CHARS} characters"
    if any(not letter.isprintable() or "\ud800" <= letter <= "\udfff" for letter in name):
        return "must have printable characters only"
    return ""


def _each(text: str) -> Iterator[NamedAdapter]:
    """Yields the adapters in a list of NAME=PATH entries and JSON objects, separated by commas or white space."""
    decoder = json.JSONDecoder()
    rest = text.strip(", \t\n")
    while rest:
        if rest.startswith("{"):
            try:
                value, end = decoder.raw_decode(rest)
            except ValueError as error:
                raise ConfigError(f"{FLAG}: {rest[:80]!r} is not JSON: {error}") from None
            yield _from_json(value)
        else:
            end = next((at for at, letter in enumerate(rest) if letter in ", \t\n"), len(rest))
            name, equals, path = rest[:end].partition("=")
            if not (name and equals and path):
                raise ConfigError(f"{FLAG} takes NAME=PATH, or JSON with name and path, not {rest[:end][:80]!r}")
            yield NamedAdapter(name, _absolute(path))
        rest = rest[end:].strip(", \t\n")


def _from_json(value: Any) -> NamedAdapter:
    if not {"name", "path"} <= value.keys() <= JSON_KEYS or not all(isinstance(each, str) for each in value.values()):
        raise ConfigError(f"{FLAG}: JSON needs the texts name and path, and may have base_model_name, not {value}")
    return NamedAdapter(value["name"], _absolute(value["path"]), value.get("base_model_name", ""))


def _absolute(path: str) -> str:
    return os.path.realpath(Path(path).expanduser())


def path_problem(path: str, model: ModelConfig) -> str:
    """Returns why the folder of an adapter may not be read; empty if it may.

    A folder may be read if a flag names it, or if it lies below the folder of --allow-runtime-lora with links resolved.
    """
    try:
        real = os.path.realpath(path)
    except ValueError:
        return "is not the name of a file: it has a zero byte"
    if any(adapter.path == real for adapter in named_adapters(model)):
        return ""
    if not model.allow_runtime_lora:
        return "is not in --lora-modules, and the server was not started with --allow-runtime-lora"
    root = os.path.realpath(Path(model.allow_runtime_lora).expanduser())
    below = os.path.commonpath((root, real)) == root and real != root
    return "" if below else "is not below the folder of --allow-runtime-lora"


# Finds the pattern of `rank_pattern` or `alpha_pattern` for a module: the first that matches the end of its name.
#
# Patterns are regular expressions written by the author of the adapter, and matching can take years, as for `(a*)*b`.
# Patterns with repetition or alternatives are matched in a child process, whose death costs only this adapter. Plain
# names, the usual case, are matched without a child.

PLAIN = re.compile(r"[\w.-]*")
MOST_MATCHES = 2_000_000  # patterns times modules: some seconds of matching
MATCH, SECONDS, MEGABYTES = "shared.lora:matches", 5.0, 256


def first_matches(field: str, patterns: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Returns the index of each module's pattern, -1 if no pattern matches. Blocks for up to `SECONDS`.

    field: the field of the configuration, for errors. Raises AdapterError.
    """
    if len(patterns) * len(modules) > MOST_MATCHES:
        raise AdapterError(f"{CONFIG}: {field} has {len(patterns)} patterns for {len(modules)} modules: too many")
    if all(PLAIN.fullmatch(pattern) for pattern in patterns):
        return matches(patterns, modules)
    child = Sandbox(MATCH, megabytes=MEGABYTES)
    try:
        found: list[int] = child.call(patterns, modules, seconds=SECONDS)
    except Lost as error:
        raise AdapterError(f"{CONFIG}: {field} cannot be matched: {error}") from None
    except (Raised, UnicodeEncodeError) as error:
        raise AdapterError(f"{CONFIG}: {field} has something that is no regular expression: {error}") from None
    except NotStarted as error:
        raise AdapterError(f"{CONFIG}: {field} cannot be matched now: {error}") from None
    finally:
        child.close()
    return found


def matches(patterns: Sequence[str], modules: Sequence[str]) -> list[int]:
    """Returns for each module the index of the first pattern that matches the end of its name; -1 for no match."""
    compiled = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
    return [next((i for i, one in enumerate(compiled) if one.match(module)), -1) for module in modules]


# Compares the base model that an adapter's config names with the model that is served.

KEY = "base_model_name_or_path"
MAX_CHARS = 200  # a longer name is shown only up to here
FORMAT = re.compile(r"[-_.](?:awq|gptq|bnb|fp8|nvfp4|mxfp4|gguf|mlx|int[48]|[48]bit|w\d|q\d).*")


def base_of(files: AdapterFiles) -> str:
    """Returns the name of the base that the adapter was made for; empty if its config names none."""
    try:
        config = json.loads(files.config or b"{}")
    except (ValueError, RecursionError):
        return ""
    found = config.get(KEY) if isinstance(config, dict) else None
    return "".join(letter for letter in found if letter.isprintable())[:MAX_CHARS] if isinstance(found, str) else ""


def other_base(base: str, served: Iterable[str]) -> bool:
    """Returns whether `base` is clearly another model than the served one, whose names and path are `served`.

    Only names of the form OWNER/MODEL say anything: folders have any names. Owners are left out, because many publish
    the same weights, and so are formats, such as AWQ. Names of which one begins with the other may be one model, too.
    """
    if base.startswith(("/", ".", "~")) or base.count("/") != 1:
        return False
    name = _last(base)
    others = [_last(one) for one in served if one]
    return bool(name) and not any(one.startswith(name) or name.startswith(one) for one in others if one)


def _last(name: str) -> str:
    return FORMAT.sub("", name.rstrip("/").rpartition("/")[2].lower())
