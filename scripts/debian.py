"""Programs from Debian's packages that checks need: installed where this runs as root, else named with the command that installs them.

    ensure({"tshark": "tshark"})                    program -> package
    python scripts/debian.py PROGRAM[=PACKAGE] ...  the same from a command line

Nothing is skipped for want of a program: what can't be had ends the script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping


def ensure(programs: Mapping[str, str], more: tuple[str, ...] = ()) -> None:
    """Make every program of `programs` (name -> package) be there; `more` are packages without a program, installed with them."""
    missing = [package for program, package in programs.items() if shutil.which(program) is None]
    if not missing:
        return
    packages = [*dict.fromkeys([*missing, *more])]
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"{', '.join(missing)} is needed for these checks and not installed; as root: {' '.join(command)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    print(f"installing {', '.join(packages)} ...", flush=True)
    subprocess.run(["apt-get", "update", "-qq"], env=environment, check=False, stdout=subprocess.DEVNULL)
    installed = subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
    still = [program for program in programs if shutil.which(program) is None]
    if installed.returncode or still:
        sys.exit(f"{' '.join(command)} failed with exit status {installed.returncode}; install {', '.join(packages)} by hand and try again")


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    pairs = [argument.partition("=") for argument in sys.argv[1:]]
    ensure({program: package or program for program, _, package in pairs})


if __name__ == "__main__":
    main()
