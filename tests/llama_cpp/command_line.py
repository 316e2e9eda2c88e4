"""Translates a command line of llama-server into one of `sluice serve`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.config.settings import MOST_DRAFTS
from tests.llama_cpp.stand_ins import StandIns

SAME = {
    "--port": "--port", "--host": "--host", "--api-key": "--api-key", "--cors-origins": "--cors-origins",
    "--models-max": "--max-loaded-models",
}  # fmt: skip
SWITCHES = {  # flags without a value → their translation for Sluice
    "--embedding": (), "--reranking": (), "--kv-unified": (),
    "--offline": (), "--jinja": (), "--no-jinja": (), "--slots": (), "--no-slots": (),
    "--cont-batching": (), "--swa-full": (), "--no-mmproj": (), "--no-cache-idle-slots": (), "--verbose": (),
    "--metrics": ("--metrics-aliases", "llama.cpp"),
}  # fmt: skip
WITHOUT_EFFECT = {  # flags with a value that concern only speed or memory, or that a request of Sluice decides
    "--batch-size", "--ubatch-size", "--threads", "--n-gpu-layers", "-fa", "--seed", "--n-predict",
    "--cache-ram", "--temp", "--pooling", "--reasoning", "--spec-draft-n-min",
}  # fmt: skip
READ = {
    "--hf-repo", "--hf-file", "--alias", "--ctx-size", "--parallel", "--chat-template-file", "--chat-template",
    "--reasoning-format", "--media-path", "--lora", "--model-draft", "--spec-type", "--spec-draft-n-max",
}  # fmt: skip


class NotOffered(Exception):
    """Sluice has no counterpart of a flag or a value. The message is the flag or the value."""


@dataclass
class CommandLine:
    values: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)


def read(arguments: Sequence[str]) -> CommandLine:
    """Reads the arguments of llama-server, without the program's name.

    Raises:
        NotOffered: for a flag without a counterpart in Sluice
    """
    line = CommandLine()
    rest = iter(arguments)
    for flag in rest:
        if flag in SWITCHES:
            line.switches.add(flag)
        elif flag in SAME or flag in WITHOUT_EFFECT or flag in READ:
            line.values[flag] = next(rest)
        else:
            raise NotOffered(flag)
    return line


def serve_arguments(line: CommandLine, stand_ins: StandIns, working: Path) -> list[str]:
    """Returns the arguments of `sluice serve`.

    working: the folder that relative paths start from

    Raises:
        NotOffered: for a model without a stand-in, and for values without a counterpart in Sluice
    """
    values = line.values
    made = _model(line, stand_ins)
    if "," in values.get("--host", ""):
        raise NotOffered("several --host")
    for flag, ours in SAME.items():
        made += [ours, values[flag]] if flag in values else []
    slots = int(values.get("--parallel", 4))
    made += ["--max-batch-size", str(slots), "--threads", "1", "--allowed-media-domains", "127.0.0.1"]
    made += [ours for switch in sorted(line.switches) for ours in SWITCHES[switch]]
    if "--ctx-size" in values:
        context = int(values["--ctx-size"])
        made += ["--max-seq-len", str(context if "--kv-unified" in line.switches else context // slots)]
    if "--chat-template-file" in values:
        made += ["--chat-template", str((working / values["--chat-template-file"]).resolve())]
    if "--chat-template" in values:
        made += ["--chat-template", str(stand_ins.template(values["--chat-template"]))]
    if "--media-path" in values:
        made += ["--allowed-media-path", str((working / values["--media-path"]).resolve())]
    if "--lora" in values:
        made += ["--lora-modules", f"adapter={values['--lora']}", "--allow-runtime-lora", str(stand_ins.folder)]
    made += _reasoning(values) + _drafts(values)
    return made


def _model(line: CommandLine, stand_ins: StandIns) -> list[str]:
    name = line.values.get("--hf-file", line.values.get("--hf-repo", ""))
    if not name:  # without a model, the server is a router, which loads the model that a request names
        return ["--models", str(stand_ins.table)]
    if name not in stand_ins.models:
        raise NotOffered(f"model {name}")
    task = "embed" if "--embedding" in line.switches else "score" if "--reranking" in line.switches else "generate"
    names = line.values.get("--alias", "m").split(",")
    made = ["--model", str(stand_ins.models[name]), "--task", task, "--any-model-name", "--worker-metrics-port", "0"]
    return [*made, "--served-model-name", *names]


def _reasoning(values: Mapping[str, str]) -> list[str]:
    match values.get("--reasoning-format", "deepseek"):
        case "deepseek":
            return []
        case "none":
            return ["--reasoning-format", "none"]
        case other:
            raise NotOffered(f"--reasoning-format {other}")


def _drafts(values: Mapping[str, str]) -> list[str]:
    if "--model-draft" not in values:
        return []
    drafts = min(int(values.get("--spec-draft-n-max", 7)), MOST_DRAFTS)  # fewer drafts change no byte of an answer
    config = {"method": "draft_model", "model": values["--model-draft"], "num_speculative_tokens": drafts}
    return ["--speculative-config", json.dumps(config)]
