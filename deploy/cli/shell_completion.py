"""`sluice completion bash|zsh`: prints a completion script that shtab makes from the argument parsers.

To use it: `source <(sluice completion bash)`. shtab's scripts need a wrapper: bash splits `--flag=value` into three
words, which shtab's bash script does not join, and shtab's zsh script registers itself only inside `eval`.
"""

import argparse
import re

from deploy.cli.main import COMMANDS, TOOLS, Command, Tool, load_function
from shared.config.flags import Parser, add_flags

SHELLS = ("bash", "zsh")

_BASH = """\
{script}
_sluice() {{
    local -a words=()
    local i cword=$COMP_CWORD
    for i in "${{!COMP_WORDS[@]}}"; do
        if [[ ${{COMP_WORDS[i]}} != = ]]; then words+=("${{COMP_WORDS[i]}}")
        elif (( i == COMP_CWORD )); then words+=("")
        elif (( i < COMP_CWORD )); then (( cword-- )); fi
    done
    COMP_WORDS=("${{words[@]}}") COMP_CWORD=$cword
    _shtab_sluice
}}
complete -o default -F _sluice sluice"""

_ZSH = """\
#compdef sluice
eval "$(cat <<'SLUICE_COMPLETION'
{script}
SLUICE_COMPLETION
)\""""


def parser() -> Parser:
    parser = Parser(prog="sluice completion", description="Print a script: source <(sluice completion bash)")
    parser.add_argument("shell", choices=SHELLS)
    return parser


def completion(words: list[str]) -> int:
    print(script(parser().read(words).shell))
    return 0


def script(shell: str) -> str:
    """Returns the completion script for `shell`, which is one of SHELLS."""
    import shtab  # only this command needs it

    if shell == "bash":
        return _BASH.format(script=shtab.complete(_all_commands(), shell))  # `-o default` completes files
    generated = shtab.complete(_all_commands(file=shtab.FILE), shell)
    return _ZSH.format(script=re.sub(r'^( +"--[\w-]+)(\[.*\]:)', r"\1=\2", generated, flags=re.MULTILINE))


def _all_commands(file: dict[str, str] | None = None) -> argparse.ArgumentParser:
    """Returns one parser that has every command as a subcommand.

    file: how shtab completes values without choices.
    """
    top = Parser(prog="sluice")
    commands = top.add_subparsers(metavar="command")
    for name, entry in (COMMANDS | TOOLS).items():
        parents = [parser for parser in [_parser(entry)] if parser is not None]
        subparser = commands.add_parser(name, help=entry.about, parents=parents, add_help=not parents)
        for action in subparser._actions:
            _describe_values(action, file)
    return top


def _parser(entry: Command | Tool) -> Parser | None:
    match entry:
        case Command(flags=flags):
            parser = Parser()
            add_flags(parser, flags)
            return parser
        case Tool(parser=place):
            return load_function(place)() if place else None


def _describe_values(action: argparse.Action, file: dict[str, str] | None) -> None:
    """Prepares one argument for shtab.

    A metavar such as `a|b|c` becomes the list of choices; an argument without choices is completed as `file` says. The
    help text is cut before its first ` [`, where defaults and variables begin.
    """
    action.help = action.help and action.help.partition(" [")[0]
    if action.nargs == 0:
        return
    if isinstance(action.metavar, str) and "|" in action.metavar:
        action.choices = action.metavar.split("|")
    elif action.choices is None and file:
        action.complete = file  # type: ignore[attr-defined]
    action.metavar = "value"
