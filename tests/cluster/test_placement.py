"""Placement: the points of the specification, fair by weight, and a lost node moves only its own keys."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kbtp_core.cluster.placement import Placement


def ids(count: int) -> np.ndarray:
    return np.frombuffer(b"".join(hashlib.sha256(str(i).encode()).digest()[:16] for i in range(count)), np.uint8).reshape(-1, 16)


def test_a_key_goes_to_the_first_point_at_or_after_its_hash_and_wraps() -> None:
    placement = Placement({"a": 1, "b": 1})
    points = sorted(
        (int.from_bytes(hashlib.md5(f"{name}-{i}".encode()).digest()[4 * k : 4 * k + 4], "little"), name)
        for name in "ab"
        for i in range(40)
        for k in range(4)
    )
    assert len(points) == 320
    for point, name in points:
        assert placement.owner(point.to_bytes(4, "little") + bytes(12)) == name
    beyond = (points[-1][0] + 1).to_bytes(4, "little") + bytes(12)
    assert placement.owner(beyond) == points[0][1]


def test_keys_are_shared_out_by_weight() -> None:
    placement = Placement({"light": 1, "heavy": 3})
    shares = np.bincount(placement.owners(ids(20000)), minlength=2) / 20000
    assert placement.names == ("heavy", "light")
    assert abs(shares[0] - 0.75) < 0.08


def test_a_lost_node_moves_only_its_own_keys() -> None:
    members = {f"node-{i}": 10 for i in range(5)}
    before = Placement(members)
    after = Placement({name: weight for name, weight in members.items() if name != "node-2"})
    keys = ids(5000)
    old = np.array(before.names)[before.owners(keys)]
    new = np.array(after.names)[after.owners(keys)]
    assert (new[old != "node-2"] == old[old != "node-2"]).all()
    assert len(set(new[old == "node-2"])) == 4


def test_bad_members_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Placement({})
    with pytest.raises(ValueError, match="member a has weight 1025"):
        Placement({"a": 1025})
