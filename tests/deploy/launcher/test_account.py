"""The account of loaded models: its limits, which model is unloaded first, and which models never are."""

import math
import random

import pytest

from deploy.launcher.many_plan import MOST_DRAIN_S, RETRY_S, TURN_S, Account, Slot
from deploy.launcher.many_sizes import GIB
from shared.model_list import Entry


class Models:
    """An account with models of given sizes (GiB) and a fake clock."""

    def __init__(
        self, sizes: dict[str, int], *, models: int = 2, gib: int = 100, keep: float = math.inf, pinned: str = ""
    ) -> None:
        self.now = 0.0
        entries = [Entry(name, name=name, pinned=name in pinned) for name in sizes]
        size = lambda entry: sizes[entry.name] * GIB  # noqa: E731
        self.account = Account(entries, keep, models, gib * GIB, lambda: self.now, size)

    @property
    def slots(self) -> dict[str, Slot]:
        return self.account.slots

    def states(self, state: str) -> str:
        return "".join(name for name, slot in self.slots.items() if slot.state == state)

    def settle(self, used: str = "", wanted: str = "", seconds: int = 20) -> None:
        """Carries out the account's decisions for some seconds. Loads and unloads take no time."""
        for _ in range(seconds):
            self.account.use(used, wanted)
            self.account.forget_unwanted(wanted)
            while (slot := self.account.next_to_unload()) is not None:
                assert not slot.used or slot.drains_since is not None
            for slot in self.slots.values():
                if slot.state == "unloading" and slot.used:
                    self.account.goes_on(slot)
                elif slot.state == "unloading":
                    slot.state = "unloaded"
            while (slot := self.account.next_to_load()) is not None:
                self.account.loaded(slot)
            self.now += 1


def test_the_least_recently_used_idle_model_makes_room() -> None:
    it = Models({"a": 1, "b": 1, "c": 1})
    for name in "aba":
        it.settle(wanted=name)
    it.settle(wanted="c")
    assert it.states("loaded") == "ac"


def test_a_model_with_requests_is_never_unloaded_and_the_next_waits() -> None:
    it = Models({"a": 1, "b": 1, "c": 1})
    it.settle(wanted="ab")
    it.settle(used="ab", wanted="c", seconds=9)
    assert (it.states("loaded"), it.states("unloaded")) == ("ab", "c")
    it.settle(used="b", wanted="c")
    assert it.states("loaded") == "bc"


def test_short_requests_that_follow_each_other_keep_no_other_model_out() -> None:
    """Requests use `a` whenever it is loaded, and wait for it when it is not; somebody waits for `b`."""
    it = Models({"a": 1, "b": 1}, models=1)
    it.settle(wanted="a")
    for _ in range(int(TURN_S)):
        it.settle(used="a", wanted="b", seconds=1)
        assert it.states("loaded") == "a", "each model has its turn"
    it.settle(used="a", wanted="ba", seconds=2)
    assert it.states("unloading") == "a", "it takes no more requests, and those that it has are done"
    it.settle(wanted="ba", seconds=2)
    assert it.states("loaded") == "b"
    it.settle(used="b", wanted="a", seconds=1 + int(2 * TURN_S))
    it.settle(wanted="a", seconds=2)
    assert it.states("loaded") == "a", "and it has its turn again"


def test_a_long_request_keeps_its_model_which_takes_requests_again() -> None:
    it = Models({"a": 1, "b": 1}, models=1)
    it.settle(wanted="a")
    it.settle(used="a", wanted="b", seconds=int(TURN_S) + 1)
    assert it.states("unloading") == "a"
    it.settle(used="a", wanted="b", seconds=int(MOST_DRAIN_S) + 1)
    assert it.states("loaded") == "a"
    it.settle(used="a", wanted="b", seconds=int(MOST_DRAIN_S))
    assert it.states("loaded") == "a", "its next turn is longer"


def test_a_model_that_makes_room_goes_on_when_nobody_waits_any_more() -> None:
    it = Models({"a": 1, "b": 1}, models=1)
    it.settle(wanted="a")
    it.settle(used="a", wanted="b", seconds=int(TURN_S) + 1)
    assert it.states("unloading") == "a"
    it.settle(used="a", seconds=2)
    assert it.states("loaded") == "a"


def test_memory_is_one_account_and_several_models_go_for_a_large_one() -> None:
    it = Models({"a": 3, "b": 3, "c": 3, "d": 7}, models=9, gib=9)
    it.settle(wanted="abc")
    assert it.states("loaded") == "abc"
    it.settle(wanted="d")
    assert it.states("loaded") == "d"


def test_a_model_counts_until_its_process_has_ended() -> None:
    it = Models({"a": 5, "b": 5}, gib=9)
    it.settle(wanted="a")
    it.account.use("", "b")
    assert it.account.next_to_unload() is it.slots["a"]
    assert it.account.next_to_load() is None, "the memory of a is not free yet"
    assert it.account.nbytes == 5 * GIB


def test_the_first_that_waits_is_not_overtaken() -> None:
    it = Models({"a": 6, "large": 9, "s": 1}, models=9, gib=10)
    it.settle(wanted="a")
    it.account.use("a", ["large"])
    it.account.use("a", ["large", "s"])
    assert it.account.next_to_unload() is None
    assert it.account.next_to_load() is None
    assert it.states("loaded") == "a"


def test_what_can_never_fit_is_refused_in_words() -> None:
    it = Models({"a": 4, "b": 7, "c": 12}, models=9, gib=10, pinned="a")
    it.settle(wanted="a")
    it.settle(wanted="bc")
    assert it.slots["b"].reason == (
        "it needs 7.00 GiB, and all models together may take 10.00 GiB, of which pinned models take 4.00 GiB "
        "(--memory-gb)"
    )
    assert "12.00 GiB" in it.slots["c"].reason
    assert it.states("failed") == "bc"


def test_pinned_models_stay_and_hold_their_place() -> None:
    it = Models({"a": 1, "b": 1, "c": 1}, pinned="ab")
    it.settle(wanted="ab")
    it.settle(wanted="c")
    assert (it.states("loaded"), it.states("failed")) == ("ab", "c")
    assert "--max-loaded-models" in it.slots["c"].reason


@pytest.mark.parametrize("keep", [0.0, 5.0])
def test_an_idle_model_is_unloaded_after_its_time(keep: float) -> None:
    it = Models({"a": 1}, keep=keep)
    it.settle(wanted="a")
    it.settle(used="a")
    assert it.states("loaded") == "a"
    it.now += keep
    it.settle()
    assert it.states("unloaded") == "a"


def test_a_failure_is_tried_again_by_a_request_only_after_a_pause() -> None:
    it = Models({"a": 1})
    slot = it.slots["a"]
    it.account.ask(slot)
    assert it.account.next_to_load() is slot
    it.account.failed(slot, "no weights")
    it.account.ask(slot)
    assert it.account.next_to_load() is None
    it.account.ask(slot, explicitly=True)
    assert it.account.next_to_load() is slot
    it.account.failed(slot, "no weights")
    it.now += RETRY_S
    it.account.ask(slot)
    assert (it.account.next_to_load(), slot.attempts) == (slot, 3)


def test_what_nobody_waits_for_any_more_is_not_loaded() -> None:
    it = Models({"a": 1})
    it.account.use("", "a")
    it.account.forget_unwanted("")
    assert it.account.next_to_load() is None


def test_limits_hold_and_everyone_is_served_in_any_order_of_events() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        sizes = {name: rng.randint(1, 5) for name in "abcdef"}
        it = Models(sizes, models=rng.randint(1, 4), gib=rng.randint(5, 9), keep=rng.choice([0.0, 3.0, math.inf]))
        account = it.account
        for _ in range(150):
            loaded = [name for name in it.states("loaded")]
            used = [name for name in loaded if rng.random() < 0.3]
            account.use(used, [name for name in sizes if rng.random() < 0.3])
            while (slot := account.next_to_unload()) is not None:
                assert slot.name not in used
            for slot in it.slots.values():
                if slot.state == "unloading" and rng.random() < 0.5:
                    slot.state = "unloaded"
                if slot.state == "loading" and rng.random() < 0.5:
                    account.loaded(slot)
            while account.next_to_load() is not None:
                pass
            assert account.nbytes <= account.most_bytes
            assert sum(slot.counts for slot in it.slots.values()) <= account.most_models
            it.now += rng.random()
        for name in sizes:
            for slot in it.slots.values():
                slot.state = {"loading": "loaded", "unloading": "unloaded"}.get(slot.state, slot.state)  # type: ignore[assignment]
            it.settle(wanted=name)
            assert it.slots[name].state == "loaded", (seed, name)


def test_models_that_left_the_table_go_when_they_are_idle_and_new_ones_can_be_loaded() -> None:
    it = Models({"a": 1, "b": 1, "c": 1}, models=9, pinned="a")
    it.settle(wanted="ab")
    it.account.replace([Entry("c", name="c")])
    it.account.renew()
    it.settle(used="a", wanted="c")
    assert (it.states("loaded"), it.states("unloaded")) == ("ca", "b")
    it.account.renew()
    assert list(it.slots) == ["c", "a"], "a request computes with a"
    it.settle()
    it.account.renew()
    assert list(it.slots) == ["c"]


def test_a_changed_entry_holds_from_the_next_load_on() -> None:
    it = Models({"a": 1, "b": 1})
    it.settle(wanted="a")
    attempts = it.slots["a"].attempts
    it.account.replace([Entry("other", name="a", pinned=True), Entry("b", name="b")])
    it.settle(used="a")
    it.account.renew()
    assert (it.slots["a"].entry.model, it.slots["a"].state) == ("a", "loaded")
    it.settle()
    it.account.renew()
    assert it.slots["a"].entry.model == "other" and it.slots["a"].attempts == attempts
    it.settle(wanted="a")
    assert it.states("loaded") == "a" and it.slots["a"].keep_alive == math.inf


def test_a_table_that_is_as_before_changes_nothing() -> None:
    it = Models({"a": 1, "b": 1})
    it.settle(wanted="a")
    slots = dict(it.slots)
    it.account.replace([Entry("x", name="a")])
    it.account.replace([Entry("a", name="a"), Entry("b", name="b")])
    it.account.renew()
    it.settle()
    assert it.slots == slots and it.states("loaded") == "a"
