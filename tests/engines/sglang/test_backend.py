"""What each call of SGLang's is answered with: real host pools, a real store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kbtp_core.errors import ConfigError
from kbtp_sglang import KBTPHiCache
from tests.engines.sglang import hosts
from tests.engines.sglang.hosts import PAGE, host, indices, octets
from tests.soak.served import ServedStore

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_models = itertools.count()

Attach = Callable[..., KBTPHiCache]


@pytest.fixture
def attach(store: ServedStore) -> Iterator[Attach]:
    """Backends of one model that no other test has; they are closed at the end."""
    model = f"tests/{next(_models)}"
    made: list[KBTPHiCache] = []

    def one(pool: Any, extra: dict[str, Any] | None = None, **changed: Any) -> KBTPHiCache:
        made.append(hosts.backend(store.address, pool, extra, **({"model_name": model} | changed)))
        return made[-1]

    yield one
    for backend in made:
        backend.close()


def names(count: int) -> list[str]:
    return [f"{number:064x}" for number in range(1, count + 1)]


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interface", [1, 0])
def test_pages_come_back_into_other_places_of_another_pool(attach: Attach, layout: str, kind: str, interface: int) -> None:
    if kind == "mla" and layout == "page_head":
        layout = "page_first"
    source, target = host(layout, kind, seed=1), host(layout, kind)
    is_mla = kind == "mla"
    writer = attach(source, {"interface_v1": interface}, is_mla_model=is_mla)
    reader = attach(target, {"interface_v1": interface}, is_mla_model=is_mla)
    keys = names(3)

    if interface:
        assert writer.batch_set_v1(keys, indices(2, 9, 4)) == [True] * 3
        assert reader.batch_exists(keys) == 3
        assert reader.batch_get_v1(keys, indices(7, 0, 63)) == [True] * 3
    else:
        assert writer.batch_set(keys, [source.get_data_page(page * PAGE) for page in (2, 9, 4)])
        assert reader.batch_exists(keys) == 3
        found = reader.batch_get(keys, [target.get_dummy_flat_data_page() for _ in keys])
        for page, tensor in zip((7, 0, 63), found, strict=True):
            target.set_from_flat_data_page(page * PAGE, tensor)

    for there, here in zip((7, 0, 63), (2, 9, 4), strict=True):
        assert torch.equal(octets(target, there), octets(source, here))
    assert not octets(target, 1).any()
    assert not octets(target, 8).any()


def test_a_missing_page_is_missing_in_its_place_and_leaves_its_memory_alone(attach: Attach) -> None:
    source, target = host("page_first", seed=2), host("page_first", seed=3)
    before = octets(target, 1)
    keys = names(3)
    backend = attach(source)
    backend.batch_set_v1([keys[0], keys[2]], indices(0, 2))

    reader = attach(target)
    assert reader.batch_exists(keys) == 1
    assert reader.batch_get_v1(keys, indices(0, 1, 2)) == [True, False, True]
    assert torch.equal(octets(target, 1), before)
    assert torch.equal(octets(target, 2), octets(source, 2))


def test_a_page_that_the_store_has_is_a_success_and_is_not_sent_again(attach: Attach) -> None:
    backend = attach(host("page_first", seed=4))
    keys = names(4)
    assert backend.batch_set_v1(keys[:3], indices(0, 1, 2)) == [True] * 3
    assert backend.batch_set_v1(keys, indices(0, 1, 2, 3)) == [True] * 4
    counts = backend.counts()
    assert (counts["put/ok"], counts["put/deduplicated"]) == (4, 3)


@pytest.mark.parametrize("pages", [1, 5])
def test_as_many_indices_as_the_pages_have_are_asked_for(attach: Attach, pages: int) -> None:
    backend = attach(host("page_first", seed=5))
    assert backend.batch_set_v1(names(3), indices(*range(pages))) == [False] * 3
    assert backend.batch_get_v1(names(3), indices(*range(pages))) == [False] * 3
    assert backend.batch_exists(names(3)) == 0


def test_of_ranks_that_hold_the_same_bytes_one_writes_and_all_read(attach: Attach) -> None:
    pools = [host("page_first", "mla", seed=6), host("page_first", "mla")]
    first, second = (attach(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools))
    assert second.batch_set_v1(names(2), indices(0, 1)) == [True, True]
    assert first.batch_exists(names(2)) == 0
    assert first.batch_set_v1(names(2), indices(0, 1)) == [True, True]
    assert second.batch_exists(names(2)) == 2
    assert second.batch_get_v1(names(2), indices(3, 4)) == [True, True]
    assert torch.equal(octets(pools[1], 3), octets(pools[0], 0))


def test_a_pool_beside_that_is_split_by_heads_is_each_ranks_own_where_kv_is_not(attach: Attach) -> None:
    pools = [host("page_first", "mla", seed=17), host("page_first", "mla")]
    ranks = [attach(pool, tp_rank=rank, tp_size=2, is_mla_model=True) for rank, pool in enumerate(pools)]
    for rank, backend in enumerate(ranks):
        backend.register_mem_host_pool_v2(host("page_first", seed=20 + rank), PoolName.DRAFT)
    draft = [PoolTransfer(name=PoolName.DRAFT, keys=names(1), host_indices=indices(0))]
    ranks[0].batch_set_v2(draft)
    assert ranks[1].batch_get_v2(draft) == {PoolName.DRAFT: [False]}
    assert ranks[1].batch_set_v2(draft) == ranks[1].batch_get_v2(draft) == {PoolName.DRAFT: [True]}


@pytest.mark.parametrize(
    "changed",
    [
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"model_name": "another"},
        {"extra": {"revision": "2"}},
        {"extra": {"tenant": "another"}},
        {"extra": {"interface_v1": 0}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"dtype": torch.float16}},
        {"pool": {"heads": 2}},
        {"pool": {"kind": "mla"}},
    ],
    ids=str,
)
def test_whatever_changes_the_bytes_changes_the_key(attach: Attach, changed: dict[str, Any]) -> None:
    assert attach(host("page_first", seed=7)).batch_set_v1(names(1), indices(0)) == [True]
    assert attach(host("page_first")).batch_exists(names(1)) == 1
    extra, pool = changed.pop("extra", {}), changed.pop("pool", {})
    other = attach(host(**{"layout": "page_first", **pool}), extra, **changed)
    assert other.batch_exists(names(1)) == 0


def test_data_parallel_ranks_share_their_pages(attach: Attach) -> None:
    attach(host("page_first", seed=8), dp_rank=0).batch_set_v1(names(1), indices(0))
    assert attach(host("page_first"), dp_rank=1).batch_exists(names(1)) == 1


def test_pages_that_are_split_by_heads_are_read_by_ranks_of_another_parallel_size(attach: Attach) -> None:
    whole = host("page_head", heads=4, seed=9)
    halves = [host("page_head", heads=2) for _ in range(2)]
    attach(whole, tp_lcm_size=2, should_split_heads=True).batch_set_v1(names(2), indices(0, 1))
    for rank, half in enumerate(halves):
        reader = attach(half, tp_rank=rank, tp_size=2, tp_lcm_size=2)
        assert reader.batch_exists(names(2)) == 2
        assert reader.batch_get_v1(names(2), indices(5, 6)) == [True, True]
        want = whole.kv_buffer[:, 1, 2 * rank : 2 * rank + 2]
        assert torch.equal(half.kv_buffer[:, 6].view(torch.uint8), want.contiguous().view(torch.uint8))


def test_a_page_of_which_a_part_is_missing_is_missing(attach: Attach) -> None:
    writer = attach(host("page_head", heads=2, seed=10), tp_rank=0, tp_size=2, tp_lcm_size=2)
    writer.batch_set_v1(names(1), indices(0))
    reader = attach(host("page_head", heads=4), tp_lcm_size=2, should_split_heads=True)
    assert reader.batch_exists(names(1)) == 0
    assert reader.batch_get_v1(names(1), indices(0)) == [False]
    assert reader.get_stats().prefetch_pgs == [0]


def with_sidecar(attach: Attach, there: dict[str, list[int]], name: PoolName) -> KBTPHiCache:
    """A backend whose store has these pages of `kv` and of a pool beside it."""
    backend = attach(host("page_first", seed=11))
    backend.register_mem_host_pool_v2(host("page_first", heads=2, seed=12), name)
    keys = names(8)
    backend.batch_set_v1([keys[at] for at in there["kv"]], indices(*there["kv"]))
    transfer = PoolTransfer(name=name, keys=[keys[at] for at in there["beside"]], host_indices=indices(*there["beside"]))
    assert backend.batch_set_v2([transfer]) == {name: [True] * len(there["beside"])}
    return backend


@pytest.mark.parametrize(
    ("policy", "trailing", "beside", "want"),
    [
        (PoolHitPolicy.ALL_PAGES, None, [0, 1, 2, 5], (3, 3, [1, 2, 3])),
        (PoolHitPolicy.ALL_PAGES, None, [1, 2], (0, None, [])),
        (PoolHitPolicy.TRAILING_PAGES, None, [2, 4], (5, 5, [3, 5])),
        (PoolHitPolicy.TRAILING_PAGES, 2, [0, 1, 4, 5, 7], (6, 6, [1, 2, 6])),
        (PoolHitPolicy.TRAILING_PAGES, 2, [7], (0, None, [])),
    ],
)
def test_a_prefix_ends_where_every_pool_has_what_its_policy_asks_for(
    attach: Attach, policy: PoolHitPolicy, trailing: int | None, beside: list[int], want: tuple[int, int | None, list[int]]
) -> None:
    backend = with_sidecar(attach, {"kv": [0, 1, 2, 3, 4, 5], "beside": beside}, PoolName.SWA)
    transfer = PoolTransfer(name=PoolName.SWA, hit_policy=policy, keys=None if trailing is None else ["x"] * trailing)
    found = backend.batch_exists_v2(names(8), [transfer])
    assert found.extra_pool_hit_pages.get(PoolName.KV) == 6
    assert (found.kv_hit_pages, found.extra_pool_hit_pages.get(PoolName.SWA), found.restorable_prefix_pages) == want


def test_a_pool_of_block_groups_reports_what_it_has_and_holds_nothing_back(attach: Attach) -> None:
    backend = with_sidecar(attach, {"kv": [0, 1, 2, 3, 4, 5], "beside": [0, 1, 2]}, PoolName.DRAFT)
    groups = PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS, keys=names(6), block_pages=2, group_pages=2)
    found = backend.batch_exists_v2(names(8), [groups])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.DRAFT]) == (6, 2)


def test_each_pool_has_values_of_its_own(attach: Attach) -> None:
    backend = with_sidecar(attach, {"kv": [0], "beside": [0]}, PoolName.SWA)
    target = host("page_first", heads=2)
    backend.register_mem_host_pool_v2(target, PoolName.SWA)
    transfers = [PoolTransfer(name=PoolName.SWA, keys=names(2), host_indices=indices(4, 5))]
    assert backend.batch_get_v2(transfers) == {PoolName.SWA: [True, False]}
    assert torch.equal(octets(target, 4), octets(host("page_first", heads=2, seed=12), 0))


def test_a_pool_that_comes_later_may_have_larger_pages(attach: Attach) -> None:
    source = host("page_first", heads=1, seed=18)
    backend = attach(source)
    assert backend.batch_set_v1(names(1), indices(0)) == [True]
    backend.register_mem_host_pool_v2(host("page_first", heads=4, seed=19), PoolName.SWA)
    transfers = [PoolTransfer(name=PoolName.SWA, keys=names(1), host_indices=indices(0))]
    assert backend.batch_set_v2(transfers) == backend.batch_get_v2(transfers) == {PoolName.SWA: [True]}
    assert backend.batch_get_v1(names(1), indices(1)) == [True]
    assert torch.equal(octets(source, 1), octets(source, 0))


def test_a_pool_that_was_not_registered_is_a_miss(attach: Attach) -> None:
    backend = attach(host("page_first", seed=13))
    transfers = [PoolTransfer(name=PoolName.INDEXER, keys=names(1), host_indices=indices(0))]
    assert backend.batch_get_v2(transfers) == backend.batch_set_v2(transfers) == {PoolName.INDEXER: [False]}


def test_clear_forgets_the_models_pages_and_no_others(attach: Attach) -> None:
    backend, other = attach(host("page_first", seed=14)), attach(host("page_first", seed=14), model_name="tests/kept")
    for each in (backend, other):
        each.batch_set_v1(names(2), indices(0, 1))
    assert backend.clear() is True
    assert (backend.batch_exists(names(2)), other.batch_exists(names(2))) == (0, 2)


def test_sglang_is_told_the_pages_and_the_rate_of_each_batch_once(attach: Attach) -> None:
    backend = attach(host("page_first", seed=15))
    backend.batch_set_v1(names(3), indices(0, 1, 2))
    backend.batch_get_v1(names(4), indices(0, 1, 2, 3))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert stats.backup_bandwidth[0] > 0
    assert backend.get_stats().backup_pgs == []


def test_after_close_everything_is_a_miss(attach: Attach) -> None:
    backend = attach(host("page_first", seed=16))
    backend.batch_set_v1(names(1), indices(0))
    backend.close()
    backend.close()
    assert backend.batch_exists(names(1)) == 0
    assert backend.batch_get_v1(names(1), indices(0)) == [False]
    assert backend.clear() is False


def test_zero_copy_is_what_sglang_finds_asked_for(attach: Attach) -> None:
    assert attach(host("page_first"))._is_zero_copy
    config = hosts.engine_config({})
    KBTPHiCache(config, {})
    assert config.extra_config["interface_v1"] == 1


def test_an_unknown_setting_stops_the_engine_and_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'store'; did you mean 'stores'\?"):
        KBTPHiCache(hosts.engine_config({"store": "x"}), {})
