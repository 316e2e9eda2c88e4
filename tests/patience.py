"""How long a test waits for an event that must happen."""

PATIENCE_S = 300.0  # events take seconds, so only a hang takes this long, even on a slow and busy machine
