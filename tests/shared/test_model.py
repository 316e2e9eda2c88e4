"""The names of the served model."""

from shared.config.settings import ModelConfig


def test_served_name_defaults_to_the_model() -> None:
    assert ModelConfig(model="org/m").name == "org/m"
    assert ModelConfig(model="org/m", served_model_name="m").name == "m"


def test_names_are_separated_by_commas_and_the_first_is_told() -> None:
    config = ModelConfig(model="org/m", served_model_name="a, b,,a")
    assert (config.names, config.name) == (("a", "b"), "a")
    assert ModelConfig(model="org/m", served_model_name=",").names == ("org/m",)
