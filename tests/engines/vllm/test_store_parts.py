"""The parts of `store` mode alone: what is a hit, what a block is called, when a store is left alone."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp_core.client import Client
from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import object_id
from kbtp_vllm import weights
from kbtp_vllm.config import read_config
from kbtp_vllm.store_client import FIRST_PAUSE_S, Breaker
from kbtp_vllm.store_hits import GroupShape, HitRule
from kbtp_vllm.store_keys import BlockKeys, ids_of
from kbtp_vllm.store_lookup import LookupThread

pytestmark = pytest.mark.vllm

SHAPES = st.builds(GroupShape, st.sampled_from([16, 32, 48]), st.one_of(st.none(), st.integers(1, 200)))


def longest_by_trying(shapes: list[GroupShape], rows: list[list[bool]], limit: int, step: int) -> int:
    """What the rule says, block by block: what a token at the hit's end can still see has to be there."""
    for tokens in range(limit - limit % step, 0, -step):
        needed = [
            (row, block)
            for shape, row in zip(shapes, rows, strict=True)
            for block in range(tokens // shape.block_tokens)
            if shape.window is None or (block + 1) * shape.block_tokens > tokens - shape.window + 1
        ]
        if all(block < len(row) and row[block] for row, block in needed):
            return tokens
    return 0


@given(st.lists(SHAPES, min_size=1, max_size=3), st.integers(0, 700), st.data())
def test_a_hit_is_the_longest_prefix_that_every_group_has_whole(shapes: list[GroupShape], limit: int, data: st.DataObject) -> None:
    rows = [data.draw(st.lists(st.sampled_from([True, True, True, False]), min_size=700 // s.block_tokens, max_size=50)) for s in shapes]
    rule = HitRule(shapes)
    found = rule.tokens([np.array(row, np.bool_) for row in rows], limit)
    assert found == longest_by_trying(
        shapes, rows, min(limit, *(len(r) * s.block_tokens for r, s in zip(rows, shapes, strict=True))), rule.step
    )


def test_a_block_of_several_hashes_is_named_by_its_last() -> None:
    keys = BlockKeys([1, 3])
    request = SimpleNamespace(block_hashes=[b"%d" % at for at in range(8)], lora_request=None)
    assert (keys.count(request, 0), keys.count(request, 1)) == (8, 2)
    assert keys.of(request, 0, 6, 8) == [b"6", b"7"]
    assert keys.of(request, 1, 0, 2) == [b"2", b"5"]


def test_a_block_of_an_adapter_is_named_by_its_weights_too(tmp_path: Path) -> None:
    names = set()
    for number, octets in enumerate((b"a", b"b")):
        folder = tmp_path / str(number) / "adapter"
        folder.mkdir(parents=True)
        (folder / "adapter.safetensors").write_bytes(octets)
        lora = SimpleNamespace(lora_name="adapter", lora_path=str(folder))
        names.update(BlockKeys([1]).of(SimpleNamespace(block_hashes=[b"h"], lora_request=lora), 0, 0, 1))
    assert len(names) == 2
    assert b"h" not in names


def test_weights_of_equal_size_that_differ_anywhere_differ_in_name(tmp_path: Path) -> None:
    octets = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    (tmp_path / "model.safetensors").write_bytes(octets.tobytes())
    first = weights.fingerprint(str(tmp_path))
    (tmp_path / "README.md").write_text("not weights")
    assert weights.fingerprint(str(tmp_path)) == first != ""
    (tmp_path / "model.safetensors").write_bytes((octets + 1).tobytes())
    assert weights.fingerprint(str(tmp_path)) != first
    assert weights.fingerprint("some/hub-model") == ""
    assert (weights.model_name(str(tmp_path)), weights.model_name("some/hub-model")) == (tmp_path.name, "some/hub-model")


def test_ids_are_those_of_each_group_in_turn() -> None:
    ids = ids_of([b"one", b"two"], [[b"a", b"b"], [b"c"]])
    assert [row.tobytes() for row in ids] == [object_id(b"one", b"a"), object_id(b"one", b"b"), object_id(b"two", b"c")]
    assert ids_of([b"one"], [[]]).shape == (0, 16)


def test_a_lookup_finds_what_every_worker_has() -> None:
    spaces = [(b"one",), (b"two",)]
    with Client.embedded(b"space", ram_bytes=1 << 20, block_bytes=4096) as client:
        for space, keys in (spaces[0], [b"a", b"b", b"c"]), (spaces[1], [b"a", b"c"]):
            client.put(ids_of(space, [keys]), [np.ones(4096, np.uint8)] * len(keys))
        client.put(ids_of(spaces[1], [[b"b"]]), [np.ones(100, np.uint8)])  # not of a block's size
        thread = LookupThread(client, spaces, 4096, 5.0)
        lookup = thread.start([[b"a", b"b", b"c", b"d"]])
        assert lookup.done.wait(5.0)
        assert lookup.is_answered
        assert [row.tolist() for row in lookup.present] == [[True, False, True, False]]
        thread.close()


def test_a_store_that_was_slow_is_left_alone_for_longer_each_time_and_asked_again_when_it_was_not() -> None:
    breaker = Breaker()
    assert not breaker.is_open
    breaker.report("lookup", 1.0, 1.0)
    assert breaker.is_open
    breaker.report("lookup", 2.0, 1.0)
    begin = time.monotonic()
    while breaker.is_open:
        assert time.monotonic() < begin + 4 * FIRST_PAUSE_S
        time.sleep(0.01)
    assert time.monotonic() - begin > 1.5 * FIRST_PAUSE_S
    breaker.report("lookup", 2.0, 1.0)
    breaker.report("lookup", 0.5, 1.0)
    assert not breaker.is_open


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"mode": "store"}, 'mode is "store" and store is empty; set store to the address of a `kbtp serve`'),
        ({"store": "127.0.0.1:7400"}, 'store is set and mode is "pull"'),
        ({"mode": "store", "store": "127.0.0.1"}, "'127.0.0.1' is no address"),
        ({"mode": "store", "store": ["[::1]:7400", "host:x"]}, "'host:x' is no address"),
        ({"mode": "store", "store": "a:1", "save_share": 1.5}, "save_share is 1.5"),
    ],
)
def test_a_wrong_setting_of_the_store_is_named(extra: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_config(extra)
    assert text in str(refusal.value)


def test_stores_are_a_list_or_separated_by_commas() -> None:
    assert read_config({"mode": "store", "store": "a:1, b:2"}).store == ["a:1", "b:2"]
    assert read_config({"mode": "store", "store": ["a:1", "b:2"]}).store == ["a:1", "b:2"]
