"""Pure-torch stand-in for the CPU build of sgl_kernel (PyPI ships CUDA builds only).

Deliberately does NOT define torch.ops.sgl_kernel.convert_weight_packed, so
sglang's cpu_has_amx_support() is False and layers use forward_native.
Unknown names resolve to functions that raise when called.
"""

import torch

__version__ = "0.0.0+cpushim"
from . import kvcacheio

_lib = torch.library.Library("sgl_kernel", "FRAGMENT")
# ops that sglang only *references* at import time when is_cpu()
for _n in (
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "apply_rotary_pos_emb_cpu",
    "fused_moe_router_cpu",
):
    _lib.define(f"{_n}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    off = 0
    for i, s, e in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        req_to_token[i, s:e] = out_cache_loc[off : off + e - s].to(req_to_token.dtype)
        off += e - s


def _missing(name):
    def f(*a, **k):
        raise NotImplementedError(f"sgl_kernel.{name}: not in the CPU shim")

    f.__name__ = name
    return f


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
