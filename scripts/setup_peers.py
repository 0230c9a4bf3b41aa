"""Set up the environment that runs this script for benchmarks/store: KBTP from this checkout, and the clients of the other stores.

The servers of Redis and what Mooncake links with are Debian packages (scripts/debian.py); Mooncake and LMCache bring theirs.
"""

from __future__ import annotations

from steps import Steps

TORCH = "2.13.0"
PACKAGES = ("lmcache==0.5.6", "mooncake-transfer-engine-non-cuda==0.3.13.post1", "redis==8.1.0", "hiredis==3.5.0")


def main() -> None:
    steps = Steps("peers")
    steps.pip(f"torch {TORCH}", [f"torch=={TORCH}"])
    steps.pip(", ".join(PACKAGES), PACKAGES)
    steps.kbtp()
    steps.finish()


if __name__ == "__main__":
    main()
