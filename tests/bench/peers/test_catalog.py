from pathlib import Path

from bench.peers.catalog import PEERS, configured


def test_configured_peer_is_sluice_with_more_flags() -> None:
    peer = configured("--target-step-s 0 --chat-template '/a b/c'")
    plain = PEERS["sluice"].serve(Path("root"), Path("m"), 1)
    assert peer.serve(Path("root"), Path("m"), 1) == [*plain, "--target-step-s", "0", "--chat-template", "/a b/c"]
    assert peer.name == "sluice --target-step-s 0 --chat-template _a b_c", "which is a file's name, too"
    assert peer.alive == PEERS["sluice"].alive
