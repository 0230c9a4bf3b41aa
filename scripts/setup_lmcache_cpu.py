"""Set up the environment that runs this script with real LMCache on the CPU, and with KBTP from this checkout.

    python3 -m venv .venv
    .venv/bin/python scripts/setup_lmcache_cpu.py [--with PACKAGE ...]

LMCache is installed without what it names, and what it needs on the CPU after that, so that nothing of CUDA is fetched.
"""

from __future__ import annotations

import argparse

from steps import ROOT, Steps

TORCH = "2.13.0"
LMCACHE = "0.5.6"
REQUIREMENTS = ROOT / "examples" / "lmcache" / "requirements-cpu.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="packages", nargs="*", default=[], metavar="PACKAGE", help="also install these")
    packages: list[str] = parser.parse_args().packages

    steps = Steps("lmcache")
    steps.pip(f"torch {TORCH}", [f"torch=={TORCH}"])
    steps.pip("what LMCache needs (about 80 packages)", ["-r", str(REQUIREMENTS.relative_to(ROOT))], [REQUIREMENTS])
    steps.pip(f"lmcache {LMCACHE}", ["--no-deps", f"lmcache=={LMCACHE}"])
    if packages:
        steps.pip(", ".join(packages), packages)
    steps.kbtp()
    steps.finish()


if __name__ == "__main__":
    main()
