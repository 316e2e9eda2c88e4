"""The error of everything that is wrong with a GGUF file or its name."""


class GgufError(ValueError):
    """The file or name cannot be served. The message is one sentence that names the file and the supported values."""
