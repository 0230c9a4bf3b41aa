"""Reference CPU versions of the sgl_kernel.kvcacheio copies HiCache calls.

Index tensors are token indices, page-aligned and page-contiguous (as in SGLang).
'direct' ops take tensors; 'kernel' ops take uint64 pointer tables (ctypes memmove).
"""

import ctypes


# ---------------- io_backend = direct ----------------
def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for s, d in zip(src_layers, dst_layers):
        d[dst_indices] = s[src_indices].to(d.dtype)


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    # host page_first_direct [page, layer, page_size, ...] -> device [token, ...]
    pages = src_indices[::page_size] // page_size
    for s, d in zip(src_ptrs, dst_ptrs):
        d[dst_indices] = s[pages, layer_id].reshape(-1, *d.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    # src: K layers then V layers (device); dst: [k_buffer, v_buffer]
    pages = dst_indices[::page_size] // page_size
    nl = len(src_ptrs) // len(dst_ptrs)
    for j, d in enumerate(dst_ptrs):
        for l in range(nl):
            s = src_ptrs[j * nl + l]
            d[pages, l] = s[src_indices].reshape(len(pages), page_size, *s.shape[1:])


# ---------------- io_backend = kernel ----------------
def _mv(dst, src, n):
    ctypes.memmove(dst, src, n)


def _rows(t, idx):
    return t.reshape(t.shape[0], -1), idx


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, *a, **k):
    dst_k[dst_indices] = src_k[src_indices]
    dst_v[dst_indices] = src_v[src_indices]


def transfer_kv_all_layer(src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size, num_layers, *a, **k):
    si, di = src_indices.tolist(), dst_indices.tolist()
    for st, dt in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for l in range(num_layers):
            sb, db = int(st[l]), int(dt[l])
            for a_, b_ in zip(si, di):
                _mv(db + b_ * item_size, sb + a_ * item_size, item_size)


def transfer_kv_per_layer_pf_lf(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, *a, **k):
    # host page_first: [token, layer, head, dim]
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer_lf_pf(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, *a, **k
):
    si, di = src_indices.tolist(), dst_indices.tolist()
    for st, d in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        base = d.data_ptr()
        for l in range(num_layers):
            sb = int(st[l])
            for a_, b_ in zip(si, di):
                _mv(base + b_ * dst_layout_dim + l * item_size, sb + a_ * item_size, item_size)


def transfer_kv_per_layer_ph_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, page_size, head_num, *a, **k
):
    # host page_head: [page, head, page_size, layer, dim]
    pages = src_indices[::page_size] // page_size
    for s, d in ((src_k, dst_k), (src_v, dst_v)):
        x = s[pages, :, :, layer_id]  # [p, head, page, dim]
        d[dst_indices] = x.permute(0, 2, 1, 3).reshape(-1, *d.shape[1:])


def transfer_kv_all_layer_lf_ph(
    src_k_layers, dst_k, src_v_layers, dst_v, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, page_size, head_num, *a, **k
):
    si, di = src_indices.tolist(), dst_indices.tolist()
    for st, d in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        hs = item_size // head_num
        for l in range(num_layers):
            sb = int(st[l])
            for a_, b_ in zip(si, di):
                pg, off = divmod(b_, page_size)
                for h in range(head_num):
                    _mv(d[pg, h, off, l].data_ptr(), sb + a_ * item_size + h * hs, hs)


# ---------------- MLA ----------------
def transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size, *a, **k):
    dst[dst_indices] = src[src_indices].view(-1, *dst.shape[1:])


def transfer_kv_per_layer_mla_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, *a, **k):
    dst[dst_indices] = src[src_indices, layer_id].view(-1, *dst.shape[1:])


def transfer_kv_all_layer_mla(src_layers, dst_layers, src_indices, dst_indices, item_size, num_layers, *a, **k):
    si, di = src_indices.tolist(), dst_indices.tolist()
    for l in range(num_layers):
        sb, db = int(src_layers[l]), int(dst_layers[l])
        for a_, b_ in zip(si, di):
            _mv(db + b_ * item_size, sb + a_ * item_size, item_size)


def transfer_kv_all_layer_mla_lf_pf(src_layers, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, *a, **k):
    si, di = src_indices.tolist(), dst_indices.tolist()
    base = dst.data_ptr()
    for l in range(num_layers):
        sb = int(src_layers[l])
        for a_, b_ in zip(si, di):
            _mv(base + b_ * dst_layout_dim + l * item_size, sb + a_ * item_size, item_size)


# ---------------- Mamba state (host [slot, layer, ...]) ----------------
def transfer_kv_mamba_lf_pf(src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers, **k):
    base = dst.data_ptr()
    si, di = src_indices.tolist(), dst_indices.tolist()
    for l in range(num_layers):
        sb = int(src_ptrs[l])
        for a_, b_ in zip(si, di):
            _mv(base + b_ * dst_layout_dim + l * item_size, sb + a_ * item_size, item_size)


def transfer_kv_mamba_pf_lf(src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **k):
    sb, db = src.data_ptr(), dst.data_ptr()
    for a_, b_ in zip(src_indices.tolist(), dst_indices.tolist()):
        _mv(db + b_ * item_size, sb + a_ * src_layout_dim + layer_id * item_size, item_size)


NAMES = [n for n in dir() if n.startswith("transfer_kv_")]
