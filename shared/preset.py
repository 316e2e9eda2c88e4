"""A name for a model with defaults of its own, as Ollama's /api/create makes it, and without them /api/copy.

It costs no memory, because its requests are computed with the model's worker.
"""

import msgspec

TAG = ":latest"  # Ollama's clients may omit or add this suffix of a model name
MOST_TEXT = 1 << 18  # characters of a system message, a template or a license


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of the conversation with which all conversations of a preset begin."""

    role: str
    content: str


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name for a model, with defaults of its own.

    base: the name of a model of the table
    system: the system message of conversations that have none
    template: the chat template, in Jinja; empty: the model's own
    parameters: defaults of requests, by Ollama's names of options
    messages: what conversations begin with
    made: when the preset was made, in seconds since 1970
    """

    base: str
    system: str = ""
    template: str = ""
    parameters: dict[str, bool | int | float | str | list[str]] = {}
    messages: tuple[Told, ...] = ()
    license: str = ""
    made: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the preset is only another name."""
        return not (self.system or self.template or self.parameters or self.messages)

    def over(self, older: "Preset") -> "Preset":
        """Returns this preset with what it leaves open taken from `older`, from which it was made."""
        return Preset(
            older.base, self.system or older.system, self.template or older.template,
            older.parameters | self.parameters, self.messages or older.messages, self.license or older.license,
            self.made,
        )  # fmt: skip
