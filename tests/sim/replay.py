"""Replay one seed: `python -m tests.sim.replay SEED [REQUESTS]` prints everything that happened, and how it ended.

A seed gives the same trace octet for octet, on every machine, for one state of the code.
"""

from __future__ import annotations

import sys
import traceback

from tests.sim.world import REQUESTS, World


def main(arguments: list[str]) -> int:
    seed, requests = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else REQUESTS
    trace: list[str] = []
    world = World(seed, trace=trace, requests=requests)
    print(world.shape)
    try:
        outcome = world.run()
    except Exception:  # noqa: BLE001 - whatever went wrong is what is to be shown
        print(*trace, sep="\n")
        traceback.print_exc(file=sys.stdout)
        return 1
    print(*trace, sep="\n")
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
