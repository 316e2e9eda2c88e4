"""How long a test waits for what has to come."""

PATIENCE_S = 300.0  # for what takes seconds: only what hangs may meet it, however slow and busy the machine is
