"""OpenAI's API formats: `…_request` modules read requests and make prompts, `…_types` and `…_writer` write answers."""
