"""Quota files and the table that is made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import tenant_id
from kbtp_core.store.quota import UNLIMITED, QuotaTable, parse_quotas


def test_a_quota_file_names_tenants_by_id_or_by_name() -> None:
    text = "# octets\n6164af84acbc9ade 1000\n\n tenant-b 2000 # half\nmy tenant  3000\n* 10\n"
    limits, default = parse_quotas(text)
    assert limits == {tenant_id(b"tenant-a"): 1000, tenant_id(b"tenant-b"): 2000, tenant_id(b"my tenant"): 3000}
    assert default == 10
    assert parse_quotas("") == ({}, UNLIMITED)


@pytest.mark.parametrize("line", ["tenant-a", "tenant-a 1e9", "tenant-a -5", "1000", f"tenant-a {2**64}", "tenant-a 10GiB"])
def test_a_line_that_is_no_quota_refuses_the_file_by_name_and_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"quotas, line 2: .* is no '<tenant id or name> <octets>'"):
        parse_quotas(f"tenant-b 5\n{line}")


def test_a_tenant_that_is_listed_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="line 2: tenant 6164af84acbc9ade was listed before"):
        parse_quotas("tenant-a 5\n6164af84acbc9ade 6")


def test_a_file_is_read_again_on_request_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("tenant-a 100\n")
    table = QuotaTable(path)
    tenant = tenant_id(b"tenant-a")
    assert (table.limit(tenant), table.limit(7)) == (100, UNLIMITED)
    assert [table.ledger.charge(tenant, 60), table.ledger.charge(tenant, 60)] == [True, False]
    path.write_text("tenant-a 200\n* 5\n")
    table.reload()
    assert [table.ledger.charge(tenant, 60), table.ledger.charge(7, 6), table.ledger.charge(7, 5)] == [True, False, True]
    for octets in (b"nonsense", b"tenant-a 5\n\xff\xfe 7\n"):
        path.write_bytes(octets)
        with pytest.raises(ConfigError, match="quotas"):
            table.reload()
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        table.reload()
    assert table.limit(tenant) == 200
    assert (table.usage(), table.refused_count) == ({tenant: 120, 7: 5}, 2)
    assert [table.ledger.charge(stranger, 6) for stranger in range(100, 105)] == [False] * 5
    assert table.usage() == {tenant: 120, 7: 5}


def test_a_tenant_over_a_new_limit_keeps_what_it_has_and_gets_no_more() -> None:
    table = QuotaTable()
    assert table.ledger.charge(1, 1000)
    table.set({1: 500})
    assert not table.ledger.charge(1, 1)
    table.ledger.release(1, 600)
    assert table.ledger.charge(1, 100)


def test_tenants_that_a_file_does_not_name_have_the_default_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "quotas"
    path.write_text("tenant-a 100\n")
    assert QuotaTable(path, 50).limit(7) == QuotaTable(None, 50).limit(7) == 50
    path.write_text("* 60\n")
    assert QuotaTable(path, 50).limit(7) == 60


def test_a_missing_quota_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quota file .*none: No such file or directory"):
        QuotaTable(tmp_path / "none")
