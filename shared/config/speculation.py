"""Reads --speculative-config, which is JSON as in vLLM: the method of drafts, a draft model, and how many drafts."""

import json
from dataclasses import dataclass
from typing import Any

from shared.config.declaration import ConfigError

FLAG = "--speculative-config"
METHODS = ("ngram", "draft_model", "mtp", "eagle3")
WITH_MODEL = ("draft_model", "eagle3")  # the methods that need a checkpoint besides the served one
MOST_DRAFTS = 15  # a step computes at most 16 rows of a sequence: its last sampled token and the drafts
KEYS = {"method", "model", "num_speculative_tokens"}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """model: the checkpoint that makes drafts, named as for --model; empty with methods that need no checkpoint."""

    method: str
    model: str
    drafts: int

    @property
    def runs_a_model(self) -> bool:
        """Whether a model computes the drafts; otherwise they are found in the text."""
        return self.method != "ngram"


def read_speculative_config(text: str, default_drafts: int) -> SpeculativeConfig:
    """Parses and checks the JSON text. Raises ConfigError, which names the wrong key.

    default_drafts: the number of drafts if the text states none.
    """
    try:
        stated: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{FLAG} must be JSON, and is not: {error}") from error
    if not isinstance(stated, dict):
        raise ConfigError(f"{FLAG} must be a JSON object")
    if unknown := sorted(stated.keys() - KEYS):
        raise ConfigError(f"{FLAG} has the unknown key {unknown[0]!r}: use {', '.join(sorted(KEYS))}")
    method = stated.get("method", "draft_model" if stated.get("model") else None)
    if method not in METHODS:
        raise ConfigError(f"{FLAG}: method must be {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    model, drafts = stated.get("model", ""), stated.get("num_speculative_tokens", default_drafts)
    if not isinstance(model, str) or bool(model) != (method in WITH_MODEL):
        raise ConfigError(
            f"{FLAG}: model must be the path or name of what drafts with {' and '.join(WITH_MODEL)}, and only then"
        )
    if type(drafts) is not int or not 1 <= drafts <= MOST_DRAFTS:
        raise ConfigError(f"{FLAG}: num_speculative_tokens must be a number from 1 to {MOST_DRAFTS}")
    return SpeculativeConfig(method, model, drafts)
