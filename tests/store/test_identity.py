"""Names of values: golden vectors, and that no two different inputs have one name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp_core import _native
from kbtp_core.store.identity import (
    REPLICATED,
    Namespace,
    ObjectKey,
    PoolKind,
    Ranks,
    layout_fingerprint,
    object_id,
    object_ids,
    tenant_id,
    tenant_of,
)

NAMESPACE = Namespace(
    "tenant/a|b",
    "m\0x",
    "rev:42",
    PoolKind.MAMBA,
    "mamba.temporal",
    "bf16",
    0x1122334455667788,
    64,
    7,
    10,
    22,
    Ranks(8, 3),
    Ranks(2, REPLICATED),
    Ranks(4, 1),
)
GOLDEN_NAMESPACE = bytes.fromhex(
    "44464b564e5300020a00000074656e616e742f617c62030000006d0078060000007265763a343203000e0000006d616d62612e74656d706f72616c"
    "0400000062663136887766554433221140000000070000000a00000016000000080000000300000002000000ffffffff0400000001000000"
)


def test_an_object_id_is_the_golden_one() -> None:
    assert object_id(b"test/model", b"glm-5.2/page_777_k").hex() == "1dabbca41aba2b02a865be51fa395d70"


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        (b"test/model", 0xFA1CDE78082F951E),
        (b"tenant-a", 0x6164AF84ACBC9ADE),
        (b"tenant-b", 0x27A61068BF52563B),
        (b"default", 0x0BE9CE2205278C16),
    ],
)
def test_a_tenant_id_is_the_golden_one(tenant: bytes, expected: int) -> None:
    assert tenant_id(tenant) == expected


def test_a_namespace_descriptor_is_the_golden_one() -> None:
    assert NAMESPACE.encode() == GOLDEN_NAMESPACE


@pytest.mark.parametrize(("layout", "expected"), [("lmcache/raw-v1", 0x448F210D9E71BA51), ("sglang-hicache/raw-v1", 0xC210798615754BAE)])
def test_a_layout_fingerprint_is_the_golden_one(layout: str, expected: int) -> None:
    assert layout_fingerprint(layout, {}) == expected


def test_the_tenant_of_a_descriptor_is_its_first_field_and_of_anything_else_the_whole() -> None:
    assert tenant_of(GOLDEN_NAMESPACE) == b"tenant/a|b"
    assert tenant_of(b"test/model") == b"test/model"
    assert tenant_of(GOLDEN_NAMESPACE[:10]) == GOLDEN_NAMESPACE[:10]


CHANGES = {
    "tenant": "other",
    "model": "other",
    "revision": "other",
    "kind": PoolKind.MLA,
    "pool": "other",
    "dtype": "fp8",
    "fingerprint": 1,
    "block_tokens": 16,
    "group": 0,
    "first_layer": 0,
    "layer_count": 1,
    "tp": Ranks(8, 4),
    "dp": Ranks(2, 0),
    "pp": Ranks(2, 1),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Namespace)])
def test_every_field_of_a_namespace_changes_the_name_of_its_values(name: str) -> None:
    other = dataclasses.replace(NAMESPACE, **{name: CHANGES[name]})
    assert object_id(other.encode(), b"k") != object_id(NAMESPACE.encode(), b"k")


@given(st.binary(min_size=1), st.binary(min_size=1), st.binary(min_size=1), st.binary(min_size=1))
def test_two_values_have_one_name_only_if_both_parts_are_equal(namespace: bytes, key: bytes, other: bytes, other_key: bytes) -> None:
    assert (object_id(namespace, key) == object_id(other, other_key)) == ((namespace, key) == (other, other_key))


def test_layout_values_of_different_types_do_not_run_together() -> None:
    values = (1, True, "1", b"1", None, 0, False, "", b"", "none:")
    assert len({layout_fingerprint("x/v1", {"field": value}) for value in values}) == len(values)


def test_an_object_key_has_every_coordinate() -> None:
    key = ObjectKey("kv", "ab12", tp=Ranks(8, REPLICATED), group=2, scatter=(4, 1))
    assert key.encode() == b"dfkv/pool/v2|pool=kv|hash=ab12|dp=1:0|tp=8:-1|pcp=1:0|dcp=1:0|pp=1:0|group=2|component=kv|sg=4:1"
    with pytest.raises(ValueError, match="be part of an object key"):
        ObjectKey("a|b", "ab12").encode()


def test_empty_names_are_refused() -> None:
    for namespace, key in ((b"", b"k"), (b"n", b"")):
        with pytest.raises(ValueError, match="empty"):
            object_id(namespace, key)
    with pytest.raises(ValueError, match="fit into its field"):
        dataclasses.replace(NAMESPACE, group=1 << 32).encode()


@pytest.fixture(params=[False, True], ids=["fastest", "portable"])
def sha256(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.use_portable_sha256(request.param)
    yield
    _native.use_portable_sha256(False)


@pytest.mark.usefixtures("sha256")
def test_many_names_at_once_are_those_of_one_by_one() -> None:
    keys: list[bytes | str] = [bytes(range(256))[:length] * 2 for length in range(1, 200)]
    keys += ["a text", "ein Schlüssel", "glm-5.2/page_777_k", b"x" * 100_000]
    for namespace in (b"n", b"test/model", GOLDEN_NAMESPACE, b"\0" * 64, b"n" * 1000):
        ids = object_ids(namespace, keys)
        assert ids.shape == (len(keys), 16)
        wanted = [object_id(namespace, key.encode() if isinstance(key, str) else key) for key in keys]
        assert [row.tobytes() for row in ids] == wanted


def test_no_names_at_once_are_none() -> None:
    assert object_ids(b"n", []).shape == (0, 16)


@pytest.mark.parametrize(
    ("namespace", "keys", "error"),
    [
        (b"", [b"k"], ValueError),
        (b"n", [b"k", b""], ValueError),
        (b"n", [b"k", 3], TypeError),
        (b"n", 3, TypeError),
        (b"n", ["\ud800"], ValueError),
    ],
)
def test_what_is_no_name_is_refused_among_many(namespace: bytes, keys: list[bytes], error: type[Exception]) -> None:
    with pytest.raises(error):
        object_ids(namespace, keys)
