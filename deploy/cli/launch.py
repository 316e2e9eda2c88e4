"""`sluice launch CLIENT`: writes a coding agent's configuration for a running server, and starts it if it is installed.

The files are Sluice's own: no file of the client's user is read or changed. Each client is a row of `CLIENTS`.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.launcher.child_command import CliError
from shared.config.flags import Parser

LEAST_ROOM = 2000  # tokens beside a client's instructions with which a task may be done; with fewer, a note says so
NO_KEY = "none"  # clients want a key, and a server without keys accepts any


@dataclass(frozen=True, slots=True)
class Client:
    """A client, and how it learns of a server.

    The texts are templates. $url is the address with /v1, $root without; $model the model's name; $key the API key;
    $context the longest sequence in tokens, $output a limit on an answer; $folder the folder of the files. In files,
    each of them is a string of JSON, which TOML and YAML read, too; $sluice_model and $openai_model have a provider's
    name before the model's.

    program: what is started; about: what the client is; install: how to install it
    files: the contents of files, by their names in the folder
    env, args: the environment and arguments of the program
    instructions: about how many tokens its instructions and tools take, before a word of its user; 0: not measured
    """

    program: str
    about: str
    install: str
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    instructions: int = 0


CODEX = """\
model = $model
model_provider = "sluice"
model_context_window = $context
web_search = "disabled"

[agents]
enabled = false

[model_providers.sluice]
name = "Sluice"
base_url = $url
wire_api = "responses"
supports_websockets = true
env_key = "SLUICE_API_KEY"
"""
OPENCODE = """\
{
  "$$schema": "https://opencode.ai/config.json",
  "model": $sluice_model,
  "small_model": $sluice_model,
  "provider": {
    "sluice": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "Sluice",
      "options": {"baseURL": $url, "apiKey": "{env:SLUICE_API_KEY}"},
      "models": {$model: {"name": $model, "tool_call": true, "limit": {"context": $context, "output": $output}}}
    }
  }
}
"""
AIDER = """\
{
  $openai_model: {
    "litellm_provider": "openai", "mode": "chat", "max_input_tokens": $context, "max_output_tokens": $output
  }
}
"""
CONTINUE = """\
name: Sluice
version: 1.0.0
schema: v1
models:
  - name: $model
    provider: openai
    model: $model
    apiBase: $url
    apiKey: $key
    roles: [chat, edit, apply]
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: $context, maxTokens: $output}
"""
QWEN_CODE = """\
{"model": {"generationConfig": {"contextWindowSize": $context}}}
"""
CLINE = """\
{
  "version": 1,
  "lastUsedProvider": "openai-compatible",
  "providers": {
    "openai-compatible": {
      "settings": {"provider": "openai-compatible", "apiKey": $key, "model": $model, "baseUrl": $url},
      "updatedAt": "2026-01-01T00:00:00.000Z",
      "tokenSource": "manual"
    }
  }
}
"""
CLINE_MODELS = """\
{
  "version": 1,
  "providers": {
    "openai-compatible": {"models": {$model: {"id": $model, "contextWindow": $context, "maxTokens": $output}}}
  }
}
"""
PI = """\
{
  "providers": {
    "sluice": {
      "baseUrl": $url, "api": "openai-completions", "apiKey": "SLUICE_API_KEY",
      "models": [{"id": $model, "contextWindow": $context, "maxTokens": $output}]
    }
  }
}
"""
OPENAI = {"OPENAI_BASE_URL": "$url", "OPENAI_API_KEY": "$key"}
CLIENTS: Mapping[str, Client] = {
    "codex": Client(
        "codex", "OpenAI's Codex", "npm install -g @openai/codex", {"config.toml": CODEX},
        {"CODEX_HOME": "$folder", "SLUICE_API_KEY": "$key"}, instructions=6100,
    ),
    "opencode": Client(
        "opencode", "opencode", "npm install -g opencode-ai", {"opencode.json": OPENCODE},
        {"OPENCODE_CONFIG": "$folder/opencode.json", "SLUICE_API_KEY": "$key"},
        instructions=7300,
    ),
    "aider": Client(
        "aider", "aider", "python -m pip install aider-install && aider-install", {"models.json": AIDER},
        {"OPENAI_API_BASE": "$url", "OPENAI_API_KEY": "$key"},
        ("--model", "openai/$model", "--model-metadata-file", "$folder/models.json", "--no-show-model-warnings"),
    ),
    "qwen-code": Client(
        "qwen", "Qwen Code", "npm install -g @qwen-code/qwen-code", {"defaults.json": QWEN_CODE},
        {**OPENAI, "OPENAI_MODEL": "$model", "QWEN_CODE_SYSTEM_DEFAULTS_PATH": "$folder/defaults.json"},
        instructions=17700,
    ),
    "cline": Client(
        "cline", "Cline's command line", "npm install -g cline",
        {"settings/providers.json": CLINE, "settings/models.json": CLINE_MODELS}, {}, ("--data-dir", "$folder"),
        instructions=5400,
    ),
    "continue": Client(
        "cn", "Continue's command line", "npm install -g @continuedev/cli", {"config.yaml": CONTINUE}, {},
        ("--config", "$folder/config.yaml"), instructions=2300,
    ),
    "pi": Client(
        "pi", "pi", "npm install -g @mariozechner/pi-coding-agent", {"models.json": PI},
        {"PI_CODING_AGENT_DIR": "$folder", "SLUICE_API_KEY": "$key"}, ("--provider", "sluice", "--model", "$model"),
        instructions=1400,
    ),
    "mini-swe-agent": Client(
        "mini", "mini-SWE-agent", "python -m pip install mini-swe-agent", {},
        {
            "OPENAI_API_BASE": "$url", "OPENAI_API_KEY": "$key", "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_GLOBAL_CONFIG_DIR": "$folder",
        },
        ("--model", "openai/$model"), instructions=900,
    ),
    "claude-code": Client(
        "claude", "Claude Code", "npm install -g @anthropic-ai/claude-code", {},
        {
            "ANTHROPIC_BASE_URL": "$root", "ANTHROPIC_AUTH_TOKEN": "$key", "ANTHROPIC_MODEL": "$model",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "$output",
        },
        instructions=21200,
    ),
    "goose": Client(
        "goose", "goose", "see https://github.com/block/goose", {},
        {"GOOSE_PROVIDER": "openai", "GOOSE_MODEL": "$model", "OPENAI_HOST": "$root", "OPENAI_API_KEY": "$key"},
        ("session",),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """A client's configuration for one server: files by path, the environment's additions, and the command line."""

    files: Mapping[Path, str]
    env: Mapping[str, str]
    command: tuple[str, ...]

    @property
    def shown(self) -> str:
        """The configuration as text that a shell could run, after files that stand before it."""
        files = [f"# {path}\n{text}" for path, text in self.files.items()]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return "\n".join([*files, " ".join([*variables, shlex.join(self.command)])])


def parser() -> Parser:
    clients = ", ".join(CLIENTS)
    made = Parser(
        prog="sluice launch", usage="sluice launch CLIENT [--flag value ...] [-- the client's own arguments]",
        description="Write a client's configuration for a running server into a folder of its own, and start the "
        f"client. Clients: {clients}.",
    )  # fmt: skip
    made.add_argument("client", choices=[*CLIENTS], metavar="CLIENT", help=clients)
    made.add_argument("--url", default=DEFAULT_URL, help=f"the server [{DEFAULT_URL}]")
    add_key(made)
    made.add_argument("--model", metavar="NAME", help="the model [the first of the server]")
    made.add_argument(
        "--context", metavar="TOKENS", type=int, help="the longest sequence [what the server says of the model]"
    )
    made.add_argument("--print", action="store_true", help="print files and command line; write and start nothing")
    return made


def launch(words: list[str]) -> int:
    """Writes the configuration and becomes the client; with --print, only prints, and returns the exit code.

    Raises CliError if the server does not answer or serves no such model, and if the client is not installed.
    """
    own, extra = _split(words)
    args = parser().read(own)
    client, server = CLIENTS[args.client], Server(args.url, args.api_key)
    model, context = _model(server, args.model, args.context)
    made = configured(client, _folder(args.client), server.url, args.api_key, model, context, tuple(extra))
    if args.print:
        print(made.shown)
        return 0
    for path, text in made.files.items():
        _write(path, text)
    program = shutil.which(client.program)
    if program is None:
        written = f"its configuration is in {_folder(args.client)}; " if made.files else ""
        raise CliError(f"{client.program} is not installed: {written}install it by: {client.install}", 1)
    if context < client.instructions + LEAST_ROOM:
        print(
            f"sluice launch: {args.client} begins with about {client.instructions:,} tokens of instructions and tools, "
            f"and {model} has {context:,} tokens for all; see --max-seq-len of `sluice serve`",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    os.execve(program, made.command, {**os.environ, **made.env})


def configured(
    client: Client, folder: Path, url: str, key: str, model: str, context: int, extra: tuple[str, ...] = ()
) -> Launch:
    """Returns a client's configuration for one server.

    folder: of the client's files; url: of the server, with or without /v1; key: the API key, or ""
    context: the longest sequence in tokens; extra: further arguments of the client
    """
    output = max(1, min(context // 4, (context - client.instructions) // 2))
    root = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    values = {
        "url": f"{root}/v1", "root": root, "model": model, "key": key or NO_KEY, "context": context,
        "output": output, "folder": str(folder), "sluice_model": f"sluice/{model}",
        "openai_model": f"openai/{model}",
    }  # fmt: skip
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return Launch(
        {folder / name: Template(text).substitute(quoted) for name, text in client.files.items()},
        {name: Template(text).substitute(values) for name, text in client.env.items()},
        (client.program, *[Template(text).substitute(values) for text in client.args], *extra),
    )


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Returns our own words and, after "--", the client's."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _model(server: Server, name: str | None, context: int | None) -> tuple[str, int]:
    """Returns the model's name and its longest sequence in tokens. Raises CliError."""
    rows = {str(row["id"]): row for row in server.model_rows()}
    name = name or next(iter(rows))
    if name not in rows:
        raise CliError(f"--model {name}: {server.url} serves {', '.join(rows)}", 2)
    found = context if context is not None else rows[name].get("max_model_len")
    if not isinstance(found, int) or found < 1:
        raise CliError(f"{server.url} does not say how long a sequence of {name} may be; see --context", 1)
    return name, found


def _folder(client: str) -> Path:
    """Returns the folder of a client's files."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "sluice" / "clients" / client


def _write(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, because it may hold a key. Raises CliError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}", 1) from error
