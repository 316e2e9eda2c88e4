"""Tests of deploy/cli/foreign_flags.py."""

import re

import pytest

from deploy.cli.foreign_flags import FOREIGN, refuse_foreign
from shared.config.declaration import ConfigError
from shared.config.flags import all_flags

OURS = {flag.option for flag in all_flags()} | {"--no-" + flag.option[2:] for flag in all_flags()}


def test_no_flag_of_ours_is_refused_and_every_flag_has_one_answer() -> None:
    options = [option for row in FOREIGN for option in row.servers]
    assert not OURS & set(options)
    assert len(options) == len(set(options))


def test_every_flag_that_an_answer_names_exists() -> None:
    named = {flag for row in FOREIGN for flag in re.findall(r"--[a-z][a-z0-9-]*", row.advice)}
    assert named and named <= OURS, named - OURS


@pytest.mark.parametrize("word", ["--pp-size", "--pp-size=2"])
def test_foreign_flag_is_answered_with_what_to_use_here(word: str) -> None:
    with pytest.raises(ConfigError, match=r"^--pp-size is a flag of SGLang: .*--workers N"):
        refuse_foreign(["demo", "--port", "80", word, "2"])


def test_flag_of_several_servers_names_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"^--trust-remote-code is a flag of vLLM and SGLang: "):
        refuse_foreign(["demo", "--trust-remote-code"])


def test_own_flags_and_values_pass() -> None:
    refuse_foreign(["demo", "--port", "80", "--served-model-name", "-"])
