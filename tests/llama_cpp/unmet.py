"""Tests of llama.cpp that cannot pass here, with the reason: a file, a test of it, or one case of a test."""

NOT_OFFERED: dict[str, str] = {
    "test_mcp_servers.py": "the server starts no programs for its clients",
    "test_tools_builtin.py": "the server runs no tools for its clients",
    "test_proxy.py": "the server fetches nothing for its clients' pages",
    "test_router.py": "models are described by --models and --models-dir in Sluice's own way",
    "test_sleep.py": "a server of one model keeps it loaded",
    "test_slot_save.py": "the prefix cache takes the place of saved slots",
    "test_stream.py": "streams are not kept for clients that come back",
    "test_kv_keep_only_active.py": "there are no slots that keep K/V",
}
OWN_MODEL: dict[str, str] = {}
