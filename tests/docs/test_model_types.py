"""docs/model-types.md lists every `model_type` that transformers knows once, and those that are served as such."""

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from deploy.generate.model_types import NOT_TEXT, OTHER, PAGE, Known, page, served, why_not
from shared.checkpoint import ENCODERS
from worker.checkpoint.checkpoint import CheckpointError
from worker.models.config import spec_from_config


def sections() -> dict[str, list[str]]:
    """Returns the model types in each section of the page."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    tables = {name: text.partition("| --- |")[2] or text for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    found = {name: re.findall(r"`([^`]+)`", text) for name, text in tables.items()}
    return {name: [type for type in types if "/" not in type] for name, types in found.items()}


def test_page_lists_every_type_once() -> None:
    count = Counter(type for types in sections().values() for type in types)
    assert set(count) == {*CONFIG_MAPPING_NAMES, *served()} and max(count.values()) == 1, (
        "python -m deploy.generate.model_types renews the page"
    )


def test_page_says_what_is_served() -> None:
    assert sorted(sections()["Served"]) == sorted(served()) and set(ENCODERS) <= set(served())


def test_refused_types_are_refused_by_name() -> None:
    for name in (*sections()["Refused"], *sections()["Not for text"]):
        with pytest.raises(CheckpointError, match=re.escape(f"model_type {name!r} is not supported")):
            spec_from_config({"model_type": name})


def test_reasons_come_from_settings_that_are_not_empty() -> None:
    assert why_not(Known("a", {"kv_lora_rank": 512, "n_group": 8, "rope_theta": 1e4}, True)) == (
        "multi-head latent attention, a grouped router"
    )
    assert why_not(Known("b", {"kv_lora_rank": None, "n_group": 1, "rope_theta": 1e4}, True)) == OTHER


def test_page_is_made_of_what_is_known() -> None:
    def types() -> Iterator[Known]:
        yield Known("llama", {}, True)
        yield Known("mamba", {"state_size": 16, "rope_theta": 1e4}, True)
        yield Known("vit", {}, False)

    text = page(types(), "9.9")
    assert "transformers 9.9" in text and "| Mamba layers | `mamba` |" in text and f"{NOT_TEXT}; " in text
    assert text.rstrip().endswith("`vit`") and text.count("`llama`") == 1
