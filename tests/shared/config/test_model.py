"""The names of the served model."""

from shared.config import ModelConfig


def test_served_name_defaults_to_the_model() -> None:
    assert ModelConfig(model="org/m").name == "org/m"
    assert ModelConfig(model="org/m", served_model_name="m").name == "m"
