"""The text by which prefixes are shared, or not."""

from shared.prefix_identity import PrefixIdentity


def test_text_of_a_request_without_tenant_is_its_salt() -> None:
    assert PrefixIdentity().text == "" and PrefixIdentity("s").text == "s"


def test_text_has_the_tenant_on_a_line_of_its_own() -> None:
    assert PrefixIdentity("s", "alice").text == "alice\ns" and PrefixIdentity("", "alice").text == "alice\n"


def test_salt_reaches_no_prefix_of_another_tenant() -> None:
    salts = ("", "x", "alice\n", "bob\nx")
    texts = [PrefixIdentity(salt, tenant).text for tenant in ("alice", "bob") for salt in salts]
    assert len(set(texts)) == len(texts)
