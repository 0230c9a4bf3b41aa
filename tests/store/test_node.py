"""A whole store node, over real disks (folders) and sockets."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import ConfigError, KbtpError
from kbtp_core.fabric.api import FabricError
from kbtp_core.store.identity import tenant_id
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.node import StoreNode
from kbtp_core.store.node_metrics import METRICS
from kbtp_core.store.settings import StoreSettings

OK, EXISTS, MISSING = ItemStatus.OK, ItemStatus.EXISTS, ItemStatus.MISSING
PAGE = 65536


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node: StoreNode | None = None
        self.clients: list[Client] = []

    def start(self, *, disks: int = 1, **settings: object) -> StoreNode:
        self.stop()
        folders = tuple(self.folder / f"disk-{number}" for number in range(disks))
        values: dict[str, object] = {
            "listen": "127.0.0.1:0",
            "metrics_listen": "127.0.0.1:0",
            "ram": 8 << 20,
            "disk": 64 << 20,
            "data_dir": folders,
            "drain_s": 3.0,
            "session_quota": 1 << 20,
        }
        self.node = StoreNode(StoreSettings(**(values | settings)))  # type: ignore[arg-type]
        return self.node

    def client(self, namespace: bytes = b"ns", *, block_bytes: int = PAGE, **options: object) -> Client:
        assert self.node is not None
        link = LinkOptions(block_bytes=block_bytes, **options)  # type: ignore[arg-type]
        self.clients.append(Client("{}:{}".format(*self.node.address), namespace, options=link))
        return self.clients[-1]

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.clients.clear()
        if self.node is not None:
            self.node.check_integrity()
            assert self.node.close(), "something was not written"
            self.node = None

    def metrics(self) -> dict[str, float]:
        assert self.node is not None
        assert self.node.observatory is not None
        host, port = self.node.observatory.address
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        return {sample.name + "".join(f"/{v}" for v in sample.labels.values()): sample.value for f in families for sample in f.samples}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def values(count: int, size: int = PAGE, seed: int = 0) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    return [np.random.default_rng(seed * 100_000 + at).integers(0, 256, size - at % 7, np.uint8) for at in range(count)]


def read_all(
    client: Client, keys: list[str], wanted: list[np.ndarray[tuple[int], np.dtype[np.uint8]]]
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Statuses, after the octets of whatever was OK were compared."""
    buffers = [np.zeros(one.size, np.uint8) for one in wanted]
    found = client.get(keys, buffers)
    for at in np.flatnonzero(found.ok).tolist():
        assert (buffers[at] == wanted[at]).all(), f"{keys[at]} has wrong octets"
    return found.status


def test_more_than_fits_into_ram_comes_back_from_disk(world: World) -> None:
    world.start()
    client = world.client()
    keys, pages = [f"k{i}" for i in range(400)], values(400)
    for at in range(0, 400, 40):
        assert (client.put(keys[at : at + 40], pages[at : at + 40], durable=True) == OK).all()
    assert client.lengths(keys).tolist() == [page.size for page in pages]
    for at in range(0, 400, 40):
        assert (read_all(client, keys[at : at + 40], pages[at : at + 40]) == OK).all()
    assert (client.put(keys[:40], pages[40:80]) == EXISTS).all()
    assert (read_all(client, keys[:40], pages[:40]) == OK).all()


def test_what_was_durable_is_there_after_a_restart_and_what_was_not_is_written_on_the_way_out(world: World) -> None:
    world.start(disks=3)
    client = world.client()
    keys, pages = [f"k{i}" for i in range(60)], values(60)
    client.put(keys[:30], pages[:30], durable=True)
    client.put(keys[30:], pages[30:])
    world.start(disks=3)
    assert (read_all(world.client(), keys, pages) == OK).all()
    assert world.metrics()["kbtp_store_ready"] == 1


def test_removed_values_stay_removed_over_a_restart(world: World) -> None:
    world.start()
    client = world.client()
    keys, pages = [f"k{i}" for i in range(20)], values(20)
    client.put(keys, pages)
    assert client.remove(keys[:5]) == 5
    other = world.client(b"other")
    other.put(keys, pages)
    assert other.remove_all() == 20
    world.start()
    assert (read_all(world.client(), keys, pages) == [MISSING] * 5 + [OK] * 15).all()
    assert (read_all(world.client(b"other"), keys, pages) == MISSING).all()


def test_pools_of_two_sizes_share_ram_and_disk_and_a_removal_hides_a_value_in_both(world: World) -> None:
    world.start(ram=16 << 20)
    large, small = world.client(), world.client(block_bytes=4096)
    page = values(1, 3000)
    assert large.put(["k"], page, durable=True).tolist() == [OK]
    assert (read_all(small, ["k"], page) == OK).all()
    assert (read_all(large, ["k"], page) == OK).all()
    assert small.remove(["k"]) == 1
    assert (read_all(large, ["k"], page) == MISSING).all()
    assert (read_all(small, ["k"], page) == MISSING).all()
    assert world.node is not None
    assert sum(store.live_bytes for store in world.node.pools()) <= 16 << 20


def test_pools_that_are_made_at_start_share_the_ram_and_serve_the_clients_of_their_sizes(world: World) -> None:
    sizes = (16384, PAGE, 4096)
    node = world.start(ram=24 << 20, block=sizes, commit_ram="start")
    assert [pool.block_bytes for pool in node.pools()] == [*sizes]
    assert [pool.live_bytes >> 20 for pool in node.pools()] == [8, 8, 8]
    for size in sizes:
        client = world.client(block_bytes=size)
        value = np.full(size, size % 251, np.uint8)
        assert client.put([f"of {size}"], [value]).tolist() == [OK]
        buffer = np.zeros(size, np.uint8)
        assert client.get([f"of {size}"], [buffer]).ok.all()
        assert (buffer == value).all()
    assert len(node.pools()) == 3


def test_memory_moves_to_the_pool_that_misses_it(world: World) -> None:
    node = world.start(ram=16 << 20, data_dir=())
    first = world.client()
    for turn in range(30):
        first.put([f"{turn}/{i}" for i in range(10)], [bytes(PAGE)] * 10)
    client = world.client(block_bytes=4096)
    client.put(["k"], [b"v"])
    deadline = time.monotonic() + 20
    turn = 0
    while min(store.live_bytes for store in node.pools() if store.block_bytes == 4096) < 8 << 20:
        assert time.monotonic() < deadline
        turn += 1
        client.put([f"{turn}/{i}" for i in range(200)], [bytes(4096)] * 200)
    node.check_integrity()


def test_a_tenant_over_its_quota_is_refused_and_others_are_not(world: World, tmp_path: Path) -> None:
    quotas = tmp_path / "quotas"
    quotas.write_text("small 100000\n")
    node = world.start(quota_file=quotas)
    small, other = world.client(b"small"), world.client(b"other")
    pages = values(10)
    statuses = [int(small.put([f"k{i}"], [pages[i]], durable=True)[0]) for i in range(10)]
    assert statuses == [OK] + [ItemStatus.NO_SPACE] * 9
    assert (other.put([f"k{i}" for i in range(10)], pages, durable=True) == OK).all()
    quotas.write_text("small nonsense\n")
    with pytest.raises(ConfigError, match="line 1"):
        node.reload()
    quotas.write_text("small 1000000\n")
    node.reload()
    assert (small.put([f"k{i}" for i in range(1, 10)], pages[1:], durable=True) == OK).all()


def test_values_expire(world: World) -> None:
    world.start()
    assert world.node is not None
    client = Client("{}:{}".format(*world.node.address), b"ns", ttl_s=1, options=LinkOptions(block_bytes=PAGE))
    world.clients.append(client)
    client.put(["k"], [b"v"], durable=True)
    assert [one.ttl_s for one in client.list()] == [1]
    deadline = time.monotonic() + 6
    while client.exists(["k"]).any():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert read_all(client, ["k"], values(1, 1)).tolist() == [MISSING]


@pytest.mark.parametrize("settings", [{"write_mode": "around"}, {"acknowledge": "disk"}, {"engine": "file"}, {"data_dir": ()}])
def test_every_way_to_write_gives_back_what_was_put(world: World, settings: dict[str, object]) -> None:
    world.start(**settings)
    client = world.client()
    keys, pages = [f"k{i}" for i in range(40)], values(40)
    assert (client.put(keys, pages) == OK).all()
    assert (client.put(keys, pages[::-1]) == EXISTS).all()
    assert (read_all(client, keys, pages) == OK).all()
    assert client.remove(keys[:10]) == 10
    assert (read_all(client, keys, pages) == [MISSING] * 10 + [OK] * 30).all()
    assert {one.length for one in client.list()} == {page.size for page in pages[10:]}
    assert client.remove_all() == 30


def test_a_stranger_without_the_secret_gets_nothing(world: World, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("prod sesame tenants=ns\n")
    world.start(secret_file=secrets)
    assert world.client(secret=b"sesame", trust_domain="prod").put(["k"], [b"v"]).tolist() == [OK]
    for options in ({}, {"secret": b"wrong", "trust_domain": "prod"}, {"secret": b"sesame", "trust_domain": "other"}):
        stranger = world.client(**options)
        assert stranger.get(["k"], [bytearray(1)]).status.tolist() == [ItemStatus.UNAVAILABLE]
        with pytest.raises(KbtpError, match="UNAUTHENTICATED"):
            stranger.remove_all()


def test_a_client_of_a_trust_domain_has_the_tenants_of_the_domain_alone(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text(f"prod sesame\ntest mole  tenants=ns,{tenant_id(b'other'):016x}\nops rabbit tenants=*\n")
    world.start(secret_file=secrets)

    def client(domain: str, secret: bytes, namespace: bytes, block_bytes: int = PAGE) -> Client:
        return world.client(namespace, secret=secret, trust_domain=domain, block_bytes=block_bytes)

    for domain, secret, namespace in (("prod", b"sesame", b"prod"), ("test", b"mole", b"ns"), ("test", b"mole", b"other")):
        assert client(domain, secret, namespace).put(["k"], [b"v"]).tolist() == [OK]
        assert client("ops", b"rabbit", namespace).exists(["k"]).tolist() == [True]
    secrets.unlink()  # what it said holds for pools that are made later, too
    for block_bytes in (PAGE, 4096):
        stranger = client("prod", b"sesame", b"ns", block_bytes)
        assert stranger.put(["l"], [b"v"]).tolist() == [ItemStatus.REFUSED]
        assert stranger.get(["k"], [bytearray(1)]).status.tolist() == [ItemStatus.REFUSED]
        assert stranger.exists(["k"]).tolist() == [False]
        with pytest.raises(KbtpError, match=f"'prod' use the values of tenant {tenant_id(b'ns'):016x}: use a namespace of a tenant"):
            stranger.remove_all()
        with pytest.raises(KbtpError, match="refuses this client"):
            stranger.remove(["k"])
        with pytest.raises(KbtpError, match="refuses this client"):
            list(stranger.list())
    assert client("ops", b"rabbit", b"ns").exists(["k", "l"]).tolist() == [True, False]
    lines = [line for line in caplog.messages if "'prod' may not use tenant" in line]
    assert len(lines) == 2  # one for each pool
    assert f"{tenant_id(b'ns'):016x}" in lines[0]


@pytest.mark.parametrize("disks", [0, 1])
def test_quotas_that_are_read_again_are_those_of_the_file_and_the_setting_alone(world: World, tmp_path: Path, disks: int) -> None:
    quotas = tmp_path / "quotas"
    quotas.write_text("small 100\n")
    node = world.start(disks=disks, quota_file=quotas, quota_default=2000)
    small, other = world.client(b"small"), world.client(b"other")

    def put(key: str, size: int) -> list[list[int]]:
        return [client.put([key], [bytes(size)]).tolist() for client in (small, other)]

    assert put("a", 101) == [[ItemStatus.NO_SPACE], [OK]]
    quotas.write_text("other 500\n")
    node.reload()
    assert put("b", 1000) == [[OK], [ItemStatus.NO_SPACE]]
    assert put("c", 1001) == [[ItemStatus.NO_SPACE], [ItemStatus.NO_SPACE]]
    quotas.write_text("* 5000\n")
    node.reload()
    assert put("d", 3000) == [[OK], [OK]]


def test_of_many_tenants_the_largest_and_those_with_limits_are_told(world: World, tmp_path: Path) -> None:
    quotas = tmp_path / "quotas"
    quotas.write_text("tenant-3 1000000\n")
    world.start(quota_file=quotas)
    for number in range(120):
        one = world.client(b"tenant-%d" % number)
        assert one.put(["k"], [bytes(100 + number)], durable=True).tolist() == [OK]
        one.close()
    told = {name.partition("/")[2]: value for name, value in world.metrics().items() if name.startswith("kbtp_store_tenant_bytes")}
    assert len(told) == 102
    assert told[f"{tenant_id(b'tenant-3'):016x}"] == 103
    assert told[f"{tenant_id(b'tenant-119'):016x}"] == 219
    assert told["others"] == sum(100 + number for number in range(20) if number != 3)


def test_every_metric_is_declared_and_told(world: World) -> None:
    world.start(disks=2)
    world.client().put(["k"], [b"v"], durable=True)
    found = {name.partition("/")[0] for name in world.metrics()}
    assert found <= {metric.name for metric in METRICS}
    optional = {"kbtp_store_tenant_limit_bytes"}
    assert {metric.name for metric in METRICS} - found == optional
    assert world.metrics()[f"kbtp_store_puts_total/{PAGE}"] == 1


def test_an_address_in_use_is_said_with_its_setting_and_nothing_is_left_open(world: World, tmp_path: Path) -> None:
    node = world.start()
    listen = "{}:{}".format(*node.address)
    folder = tmp_path / "other"
    for _ in range(2):  # the second time the disk's lock would still be held if anything were left
        with pytest.raises(FabricError, match=f"listen is {listen}"):
            StoreNode(StoreSettings(listen=listen, metrics_listen="off", ram=8 << 20, disk=64 << 20, data_dir=(folder,)))
    assert node.observatory is not None
    taken = "{}:{}".format(*node.observatory.address)
    with pytest.raises(ConfigError, match=f"metrics_listen is {taken}"):
        StoreNode(StoreSettings(listen="127.0.0.1:0", metrics_listen=taken, ram=8 << 20))


def test_block_sizes_that_ram_has_no_room_for_are_refused(world: World) -> None:
    world.start(data_dir=())
    with pytest.raises(KbtpError, match="UNSUPPORTED"):
        world.client(block_bytes=8 << 20).remove_all()
    with pytest.raises(ConfigError, match="too few for a pool of blocks of"):
        StoreNode(StoreSettings(listen="127.0.0.1:0", metrics_listen="off", ram=1 << 20, block=(1 << 20,)))
