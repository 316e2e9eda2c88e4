"""Finds rules of a Lark grammar that allow no text that ends, so that an answer that enters one could never end.

A rule is productive if one of its alternatives has only productive parts. Terminals count as productive: Lark allows
no recursion among them. This module says nothing of a grammar whose notation it does not know.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from json import JSONDecodeError, JSONDecoder

_TOKENS = re.compile(
    r"""(?P<skipped>[ \t\r\n]+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |(?P<directive>^[ \t]*%(?:ignore|import|declare|llguidance)\b[^\n]*)
    |^[ \t]*[?!]*(?P<defined>[A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:(?!:)
    |(?P<json>%(?:json|regex)\b\s*)
    |(?P<literal>"(?:[^"\\\n]|\\.)*"i?(?:\.\."(?:[^"\\\n]|\\.)*")?|/(?:[^/\\\n]|\\.)+/[imslux]*|<[^>\n]*>|@\w+)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<optional>[?*]|~\s*0\b(?:\s*\.\.\s*\d+)?|\{\s*0?\s*,\s*\d*\s*\})
    |(?P<repeated>\+|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d+\s*(?:,\s*\d*\s*)?\})
    |(?P<sign>[|()\[\]&])""",
    re.VERBOSE | re.MULTILINE,
)
_START = "start"


@dataclass(slots=True)
class _Rule:
    """A rule, or a group in brackets, which is a rule without a name of its own."""

    alternatives: list[list[str]] = field(default_factory=lambda: [[]])  # the names of rules that each needs
    named: set[str] = field(default_factory=set)  # the names of all rules in it, needed or not


def unproductive(grammar: str) -> list[str]:
    """Returns the names of rules that `start` can reach and that allow no text that ends, in the grammar's order.

    grammar: a text in llguidance's Lark
    """
    rules = _rules(grammar)
    done = _productive(rules)
    reached, waiting = set[str](), [_START]
    while waiting:
        if (name := waiting.pop()) in rules and name not in reached:
            reached.add(name)
            waiting.extend(rules[name].named)
    return [name for name in rules if name in reached and name not in done and name.isidentifier()]


def _productive(rules: dict[str, _Rule]) -> set[str]:
    """Returns the names of productive rules. Takes time in proportion to the grammar's length."""
    uses = defaultdict[str, list[tuple[str, set[str]]]](list)  # by a rule's name: alternatives that need it, and whose
    done, waiting = set[str](), list[str]()
    for name, rule in rules.items():
        for alternative in rule.alternatives:
            missing = {one for one in alternative if one in rules}
            for one in missing:
                uses[one].append((name, missing))
            if not missing:
                waiting.append(name)
    while waiting:
        if (name := waiting.pop()) in done:
            continue
        done.add(name)
        for user, missing in uses[name]:
            missing.discard(name)
            if not missing:
                waiting.append(user)
    return done


def _rules(grammar: str) -> dict[str, _Rule]:
    """Returns the rules and groups by name (a group's is a number); nothing for notation that is not known."""
    rules: dict[str, _Rule] = {}
    open_rules = [_Rule()]  # the rule that is being read, and its groups that are open
    at = 0
    while at < len(grammar):
        token = _TOKENS.match(grammar, at)
        if token is None:
            return {}
        at, text, rule = token.end(), token.group().strip(), open_rules[-1]
        match token.lastgroup:
            case "defined":
                rule = rules[token["defined"]] = _Rule()
                open_rules = [rule]
            case "json":
                try:
                    at = JSONDecoder().raw_decode(grammar, at)[1]
                except (JSONDecodeError, RecursionError):
                    return {}
                rule.alternatives[-1].append("")
            case "literal":
                rule.alternatives[-1].append("")  # needs nothing, and may be optional
            case "name":
                rule.alternatives[-1].append(text)
                rule.named.add(text)
            case "optional":
                rule.alternatives[-1][-1:] = [""]
            case "sign" if text == "|":
                rule.alternatives.append([])
            case "sign" if text in "([":
                group = str(len(rules))
                rule.alternatives[-1].append(group)
                rule.named.add(group)
                rules[group] = _Rule()
                open_rules.append(rules[group])
            case "sign" if text in ")]":
                if len(open_rules) == 1:
                    return {}
                open_rules.pop()
                if text == "]":
                    open_rules[-1].alternatives[-1][-1:] = [""]
    return rules
