"""Backup and prefetch of HiCache pages: KBTPHiCache beside SGLang's file backend, over the same host pool.

    .venv-sglang/bin/python benchmarks/sglang/pages.py [--layout page_first] [--pages 128] [--rounds 10] [--folder /tmp/hicache]

Each round moves a batch as SGLang's storage threads do (128 pages at most), with new keys; the file backend by its generic interface, which
is the one that SGLang uses for it. The store is a process of its own on this machine, in RAM; files are in --folder, and what is read back
comes from the page cache. Prints GB/s, the median of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from sgl_cpu_shim import activate

activate()

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kbtp_sglang import KBTPHiCache
from tests.engines.sglang.hosts import engine_config
from tests.soak.served import ServedStore

PAGE, LAYERS, HEADS, DIM = 64, 32, 1, 128  # of an 8B model on one of eight ranks: 1 MiB a page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="page_first", choices=["layer_first", "page_first", "page_first_direct", "page_head"])
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    pool = host_pool(chosen.layout, chosen.pages)
    octets = chosen.pages * PAGE * LAYERS * HEADS * DIM * 2 * 2
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        served = ServedStore(folder, "--ram", str(octets * (chosen.rounds + 2) * 5 // 4))
        try:
            ours = KBTPHiCache(engine_config({"stores": served.address, "timeout_s": 10}), {})
            ours.register_mem_pool_host(pool)
            where = torch.arange(chosen.pages * PAGE)
            compare(
                "KBTPHiCache",
                octets,
                chosen.rounds,
                lambda keys: ours.batch_set_v1(keys, where),
                lambda keys: ours.batch_get_v1(keys, where),
            )
            ours.close()
        finally:
            served.stop()
        files = HiCacheFile(engine_config({}), str(folder / "files"))
        compare("HiCacheFile", octets, chosen.rounds, lambda keys: file_set(files, pool, keys), lambda keys: file_get(files, pool, keys))


def compare(name: str, octets: int, rounds: int, put: Callable[[list[str]], list[bool]], get: Callable[[list[str]], list[bool]]) -> None:
    times: dict[str, list[float]] = {"backup": [], "prefetch": []}
    pages = octets // (PAGE * LAYERS * HEADS * DIM * 4)
    for number in range(rounds + 1):
        keys = [f"{number:032x}{page:032x}" for page in range(pages)]
        for what, work in (("backup", put), ("prefetch", get)):
            begun = time.perf_counter()
            assert all(work(keys))
            times[what].append(time.perf_counter() - begun)
    rates = {what: octets / statistics.median(each[1:]) / 1e9 for what, each in times.items()}
    print(f"{name:12} backup {rates['backup']:5.2f} GB/s   prefetch {rates['prefetch']:5.2f} GB/s", flush=True)


def file_set(files: Any, pool: Any, keys: list[str]) -> list[bool]:
    return [bool(files.batch_set(keys, [pool.get_data_page(at * PAGE) for at in range(len(keys))]))]


def file_get(files: Any, pool: Any, keys: list[str]) -> list[bool]:
    found = files.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys])
    for at, page in enumerate(found):
        pool.set_from_flat_data_page(at * PAGE, page)
    return [page is not None for page in found]


def host_pool(layout: str, pages: int) -> Any:
    device = MHATokenToKVPool(
        size=PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device.get_device_pool_infos()[0].buffer_info
    pool = MHATokenToKVPoolHost(
        info,
        host_to_device_ratio=float(pages + 1),
        host_size=0,
        page_size=PAGE,
        layout=layout,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=LAYERS - 1,
    )
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    return pool


if __name__ == "__main__":
    main()
