"""sglang general plugin (entry-point group sglang.srt.plugins), loaded in every sglang process.

Makes HiCache run on the CPU device:
 1. no host-memory registration (torch.cuda.cudart() is absent on CPU torch) -> pin_memory=False
 2. binds pure-torch copies for the transfer_kv_* names that pool_host modules import only
    on CUDA/ROCm/XPU.
Nothing else in sglang is changed: controller, radix tree, storage threads are the real ones.
"""


def activate():
    import importlib
    import os

    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return
    import torch
    from sgl_kernel import kvcacheio as io
    from sglang.srt.mem_cache.pool_host import base, common

    if not hasattr(torch.cpu.Stream, "synchronize"):  # else real errors in l2_transfer are masked
        torch.cpu.Stream.synchronize = lambda self: None
    common._cuda_host_register = lambda *a, **k: None
    # sglang refuses any host pool unless >10 GiB of RAM stays free (constant in pool_host/base.py)
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = int(os.environ.get("SHIM_HICACHE_RESERVE_BYTES", 0))
    _init = base.HostKVCache.__init__

    def init(self, *a, **k):
        k["pin_memory"] = False
        _init(self, *a, **k)

    base.HostKVCache.__init__ = init
    for m in ("mha", "mla", "dsa", "mamba", "mha_mxfp8", "minimax_m3_nvfp4", "unified"):
        try:
            mod = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{m}")
        except Exception as e:
            print("shim: skip", m, repr(e))
            continue
        for n in io.NAMES:
            if not hasattr(mod, n):
                setattr(mod, n, getattr(io, n))
