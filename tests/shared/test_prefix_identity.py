"""The text that decides which requests share prefixes."""

from shared.messages import Adapter
from shared.prefix_identity import PREFIX_LENGTHS, PrefixIdentity, fits, prefix_keys
from shared.wire import pack_u32


def test_text_of_a_request_without_tenant_is_its_salt() -> None:
    assert PrefixIdentity().text == "" and PrefixIdentity("s").text == "s"


def test_text_has_the_tenant_on_a_line_of_its_own() -> None:
    assert PrefixIdentity("s", "alice").text == "alice\ns" and PrefixIdentity("", "alice").text == "alice\n"


def test_salt_reaches_no_prefix_of_another_tenant() -> None:
    salts = ("", "x", "alice\n", "bob\nx")
    texts = [PrefixIdentity(salt, tenant).text for tenant in ("alice", "bob") for salt in salts]
    assert len(set(texts)) == len(texts)


def test_no_text_with_an_adapter_is_one_without_it_or_of_another_one() -> None:
    adapters = [None, *(Adapter("a", "/a", letter * 64) for letter in "01")]
    salts = ("", "x", "lora:", "lora:\nx", "lora:" + "0" * 64 + "\n", "lora:" + "0" * 64 + "\nx", "\nx")
    for tenant in ("", "lora:", "alice"):
        texts = [PrefixIdentity(salt, tenant, adapter).text for adapter in adapters for salt in salts]
        assert len({*texts}) == len(texts)
    assert PrefixIdentity("x").text == "x", "requests without adapters keep their text"
    for adapter in adapters:
        of = PrefixIdentity("lora:" + "1" * 64 + "\n", "", adapter).text
        assert [fits(of, other) for other in adapters] == [other is adapter for other in adapters]


def test_a_prefix_has_the_same_key_in_every_prompt_of_its_identity() -> None:
    short, long = pack_u32(range(300)), pack_u32([*range(300), *range(9, 5000)])
    assert prefix_keys(short, "") == prefix_keys(long, "")[:2] and len(prefix_keys(long, "")) == 6
    assert not {*prefix_keys(long, "")} & {*prefix_keys(long, "tenant"), *prefix_keys(pack_u32(range(1, 5000)), "")}
    assert prefix_keys(pack_u32(range(63)), "") == [] and list(PREFIX_LENGTHS) == sorted(PREFIX_LENGTHS)


def test_keys_are_the_same_in_every_process() -> None:
    assert prefix_keys(pack_u32(range(256)), "a") == [742117142, 2998727011]
