"""The demo model: a Llama of four million parameters."""
