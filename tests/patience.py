"""How long a test waits for an event which must happen."""

PATIENCE_S = 300.0  # events take seconds: only a hang reaches it, even on a slow and busy machine
