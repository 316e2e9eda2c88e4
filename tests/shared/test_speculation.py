"""--speculative-config becomes settings, and its wrong keys and values are refused by name."""

import json
from typing import Any

import pytest

from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import MOST_DRAFTS, Settings, SpeculativeConfig, read_speculative_config, with_values


def checked(told: Any, **others: Any) -> Settings:
    text = told if isinstance(told, str) else json.dumps(told)
    return check(with_values(Settings(), {"speculative_config": text, **others}))


@pytest.mark.parametrize(
    ("told", "read"),
    [
        ({"method": "ngram"}, SpeculativeConfig("ngram", "", 15)),
        ({"method": "ngram", "num_speculative_tokens": 1}, SpeculativeConfig("ngram", "", 1)),
        ({"model": "/a", "num_speculative_tokens": 15}, SpeculativeConfig("draft_model", "/a", 15)),
        ({"method": "draft_model", "model": "a/b"}, SpeculativeConfig("draft_model", "a/b", 15)),
        ({"method": "mtp", "num_speculative_tokens": 3}, SpeculativeConfig("mtp", "", 3)),
        ({"method": "eagle3", "model": "a/b"}, SpeculativeConfig("eagle3", "a/b", 15)),
    ],
)
def test_what_it_states_becomes_settings(told: dict[str, Any], read: SpeculativeConfig) -> None:
    assert read_speculative_config(json.dumps(told), 15) == read
    settings = checked(told)
    assert (settings.worker.speculation, settings.worker.max_draft_tokens) == ("ngram", read.drafts)
    assert not settings.worker.overlap and check(settings) == settings


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("{", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object"),
        ({"method": "medusa"}, "method must be ngram, draft_model, mtp or eagle3"),
        ({}, "method must be"),
        ({"method": "ngram", "prompt_lookup_max": 4}, "unknown key 'prompt_lookup_max'"),
        ({"method": "ngram", "model": "/a"}, "model must be"),
        ({"method": "draft_model"}, "model must be"),
        ({"method": "mtp", "model": "/a"}, "model must be"),
        ({"method": "eagle3"}, "model must be the path or name of what drafts with draft_model and eagle3"),
        ({"method": "draft_model", "model": 7}, "model must be"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be"),
        ({"method": "ngram", "num_speculative_tokens": MOST_DRAFTS + 1}, "num_speculative_tokens must be"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens must be"),
    ],
)
def test_what_is_wrong_is_refused_by_name(told: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(told)
    assert str(refused.value).startswith("--speculative-config") and words in str(refused.value)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"speculation": "off"}, "--speculation off"),
        ({"max_draft_tokens": 3}, "--max-draft-tokens 3"),
        ({"batch_invariant": False}, "--batch-invariant"),
    ],
)
def test_settings_that_contradict_it_are_refused_by_name(others: dict[str, Any], words: str) -> None:
    for told in ({"model": "/a"}, {"method": "mtp"}, {"method": "eagle3", "model": "/a"}):
        with pytest.raises(ConfigError) as refused:
            checked({**told, "num_speculative_tokens": 5}, **others)
        assert "--speculative-config" in str(refused.value) and words in str(refused.value)
