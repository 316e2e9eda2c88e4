"""`sluice completion bash|zsh`: a script that completes the command's words, written from the flags there are.

To use it: `source <(sluice completion bash)`.
"""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.cli.commands import COMMANDS, TOOLS, Command, Tool, found
from shared.flags import Parser, add_flags

SHELLS = ("bash", "zsh")


@dataclass(frozen=True, slots=True)
class Word:
    """One flag as a shell offers it. `values`: what may follow; None when nothing does, empty: anything, a file too."""

    option: str
    about: str
    values: tuple[str, ...] | None = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """A subcommand, and what may stand behind it."""

    about: str
    words: tuple[Word, ...] = ()


def parser() -> Parser:
    made = Parser(prog="sluice completion", description="Prints a script: source <(sluice completion bash)")
    made.add_argument("shell", choices=SHELLS)
    return made


def completion(words: list[str]) -> int:
    shell = parser().read(words).shell
    print(script(shell, {name: Offer(entry.about, _words(entry)) for name, entry in (COMMANDS | TOOLS).items()}))
    return 0


def _words(entry: Command | Tool) -> tuple[Word, ...]:
    match entry:
        case Command(flags=flags):
            reader = Parser()
            add_flags(reader, flags)
            return words_of(reader)
        case Tool(parser=place):
            return words_of(found(place)()) if place else ()


def words_of(parser: argparse.ArgumentParser) -> tuple[Word, ...]:
    """Every option that the parser's help shows."""
    return tuple(
        Word(option, action.help or "", None if action.nargs == 0 else _values(action))
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
        if option.startswith("--")
    )


def script(shell: str, offers: Mapping[str, Offer]) -> str:
    """The shell's script; `shell` is one of SHELLS."""
    return _bash(offers) if shell == "bash" else _zsh(offers)


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Choices that are listed, or spelled in the help as `a|b|c`."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    shape = action.metavar if isinstance(action.metavar, str) else ""
    return tuple(shape.split("|")) if "|" in shape else ()


def _bash(offers: Mapping[str, Offer]) -> str:
    after = [
        f'        "{name} {word.option}") words={shlex.quote(" ".join(word.values))} ;;'
        for name, offer in offers.items()
        for word in offer.words
        if word.values
    ]
    first = [
        f"        {name}) words={shlex.quote(' '.join(word.option for word in offer.words))} ;;"
        for name, offer in offers.items()
        if offer.words
    ]
    return "\n".join([
        "_sluice() {",
        "    local words= command=${COMP_WORDS[1]}",
        "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}",
        "    [[ $current == = ]] && current=",  # bash cuts --flag=value into three words
        "    [[ $before == = ]] && before=${COMP_WORDS[COMP_CWORD-2]}",
        "    COMPREPLY=()",
        "    if (( COMP_CWORD == 1 )); then",
        f"        COMPREPLY=($(compgen -W {shlex.quote(' '.join(offers))} -- \"$current\"))",
        "        return",
        "    fi",
        '    case "$command $before" in',
        *after,
        "    esac",
        '    if [[ -z $words && $current == -* ]]; then case "$command" in',
        *first,
        "    esac; fi",
        '    [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _sluice sluice",
    ])  # fmt: skip


def _zsh(offers: Mapping[str, Offer]) -> str:
    commands = [shlex.quote(f"{name}:{offer.about}") for name, offer in offers.items()]
    cases = [
        f"        {name}) _arguments {' '.join(map(_zsh_word, offer.words))} '*:file:_files' ;;"
        for name, offer in offers.items()
    ]
    return "\n".join([
        "#compdef sluice",
        "_sluice() {",
        "    local -a commands",
        f"    commands=({' '.join(commands)})",
        "    if (( CURRENT == 2 )); then _describe command commands; return; fi",
        "    shift words; (( CURRENT-- ))",
        '    case "$words[1]" in',
        *cases,
        "    esac",
        "}",
        "compdef _sluice sluice",
    ])  # fmt: skip


def _zsh_word(word: Word) -> str:
    about = _zsh_text(word.about)
    if word.values is None:
        return shlex.quote(f"{word.option}[{about}]")
    follows = f"({' '.join(word.values)})" if word.values else "_files"
    return shlex.quote(f"{word.option}=[{about}]:value:{follows}")


def _zsh_text(text: str) -> str:
    """A description without what `_arguments` would read as its own signs."""
    plain = text.partition(" [")[0].replace("%%", "%")
    return "".join("\\" + char if char in "[]:\\" else char for char in plain)
