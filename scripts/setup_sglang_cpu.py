"""Set up the environment that runs this script with real SGLang on the CPU, and with KBTP from this checkout.

    python3 -m venv .venv-sglang
    .venv-sglang/bin/python scripts/setup_sglang_cpu.py [--with PACKAGE ...]

SGLang's own requirements name torch for CUDA, and of its kernels (`sgl-kernel`) only a build for CUDA is published. So SGLang is installed
without what it requires, beside torch for the CPU, and tests/engines/sglang/cpu_shim plays the kernels. torchvision's compiled part does
not load beside torch for the CPU; SGLang imports its Python part alone, which needs two operators to be declared.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from pathlib import Path

from steps import ROOT, Steps

TORCH = "2.13.0"
TORCHVISION = "0.28.0"
SGLANG = "0.5.23"
TESTS = ROOT / "tests" / "engines" / "sglang"
REQUIREMENTS = TESTS / "requirements-cpu.txt"
SHIM = TESTS / "cpu_shim"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="packages", nargs="*", default=[], metavar="PACKAGE", help="also install these")
    packages: list[str] = parser.parse_args().packages

    steps = Steps("sglang")
    steps.pip(f"torch {TORCH}", [f"torch=={TORCH}"])
    steps.pip("what SGLang needs (about 100 packages)", ["-r", str(REQUIREMENTS.relative_to(ROOT))], [REQUIREMENTS])
    steps.pip(f"sglang {SGLANG}", ["--no-deps", f"sglang=={SGLANG}", f"torchvision=={TORCHVISION}"])
    steps.call("torchvision's operators", declare_operators, [TORCHVISION])
    shim = str(SHIM.relative_to(ROOT))
    steps.pip("what plays SGLang's kernels", ["--no-build-isolation", "--no-deps", "-e", shim], [SHIM / "pyproject.toml"])
    if packages:
        steps.pip(", ".join(packages), packages)
    steps.kbtp()
    steps.finish()


def declare_operators() -> None:
    """Declare torchvision's nms operators, which its compiled part would have."""
    path = Path(sysconfig.get_path("purelib")) / "torchvision" / "_meta_registrations.py"
    text = path.read_text()
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        line = f'torch.library.define("torchvision::{name}", "{schema}")\n'
        if line not in text:
            text = re.sub(rf'^(?=@torch\.library\.register_fake\("torchvision::{name}"\))', lambda _, line=line: line, text, flags=re.M)
    path.write_text(text)


if __name__ == "__main__":
    main()
