"""`kbtp serve` with disks that fail on purpose, for tests: `python -m tests.store.faulty_serve FAULTS FLAGS…`.

FAULTS is a JSON list of [folder, point, visit, action, amount], as `store.disk.Fault` has them. Nothing differs from `kbtp serve` but how
the disks are opened.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kbtp_core.cli import app
from kbtp_core.store.disk import DiskEngine, Fault
from kbtp_core.store.node import StoreNode
from kbtp_core.store.slab import SlabEngine

FAULTS: dict[Path, list[Fault]] = {}


class FaultyNode(StoreNode):
    def _open_disk(self, folder: Path) -> DiskEngine:
        settings = self.settings
        faults = FAULTS.get(folder, [])
        return SlabEngine(folder, settings.disk, quotas=self.quotas, io_timeout_s=settings.disk_timeout_s, faults=faults)


def main() -> None:
    for folder, *fault in json.loads(sys.argv.pop(1)):
        FAULTS.setdefault(Path(folder), []).append(Fault(*fault))
    sys.modules["kbtp_core.cli.serve"].StoreNode = FaultyNode  # type: ignore[attr-defined]
    sys.argv[1:1] = ["serve"]
    app()


if __name__ == "__main__":
    main()
