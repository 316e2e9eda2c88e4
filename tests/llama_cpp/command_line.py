"""The command line of llama-server as that of `sluice serve`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SAME = {"--port": "--port", "--host": "--host", "--api-key": "--api-key", "--cors-origins": "--cors-origins"}
SWITCHES = {  # flags without a value -> what they mean for Sluice
    "--embedding": (), "--reranking": (), "--kv-unified": (),
    "--offline": (), "--jinja": (), "--no-jinja": (), "--metrics": (), "--slots": (), "--no-slots": (),
    "--cont-batching": (), "--swa-full": (), "--no-mmproj": (), "--no-cache-idle-slots": (),
}  # fmt: skip
WITHOUT_EFFECT = {  # flags with a value that decide speed or memory, or what a request decides here
    "--batch-size", "--ubatch-size", "--threads", "--n-gpu-layers", "-fa", "--seed", "--n-predict",
    "--cache-ram", "--temp", "--pooling",
}  # fmt: skip
READ = {"--hf-repo", "--hf-file", "--alias", "--ctx-size", "--parallel", "--chat-template-file", "--reasoning-format"}


class NotOffered(Exception):
    """Sluice has nothing that corresponds to a flag or a value, which is the message."""


@dataclass
class CommandLine:
    values: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)


def read(arguments: Sequence[str]) -> CommandLine:
    """arguments: those of llama-server, without the program.

    Raises:
        NotOffered: for a flag that Sluice has no counterpart of
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


def serve_arguments(line: CommandLine, models: Mapping[str, Path], working: Path) -> list[str]:
    """Returns the arguments of `sluice serve`.

    models: a file or repository of a hub -> its stand-in; working: the folder that relative paths start from

    Raises:
        NotOffered: for a model without a stand-in, and for values that Sluice does not have
    """
    values = line.values
    model = values.get("--hf-file", values.get("--hf-repo", ""))
    if model not in models:
        raise NotOffered(f"model {model}")
    if "," in values.get("--host", "") or values.get("--reasoning-format", "deepseek") not in ("deepseek", "none"):
        raise NotOffered("several --host" if "," in values["--host"] else "--reasoning-format")
    task = "embed" if "--embedding" in line.switches else "score" if "--reranking" in line.switches else "generate"
    made = ["--model", str(models[model]), "--task", task, "--any-model-name", "--worker-metrics-port", "0"]
    made += ["--served-model-name", *values.get("--alias", "m").split(","), "--threads", "1"]
    for flag, ours in SAME.items():
        made += [ours, values[flag]] if flag in values else []
    slots = int(values.get("--parallel", 4))
    made += ["--max-batch-size", str(slots)]
    if "--ctx-size" in values:
        context = int(values["--ctx-size"])
        made += ["--max-seq-len", str(context if "--kv-unified" in line.switches else context // slots)]
    if "--chat-template-file" in values:
        made += ["--chat-template", str((working / values["--chat-template-file"]).resolve())]
    if values.get("--reasoning-format") == "none":
        made += ["--reasoning-format", "none"]
    return made
