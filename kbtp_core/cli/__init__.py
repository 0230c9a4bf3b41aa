"""The command `kbtp`: thin commands over the library; each says what to do when it can't do its work."""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path

import typer
from rich.console import Console

import kbtp_core
from kbtp_core.cli import ctl
from kbtp_core.cli.bench import bench
from kbtp_core.cli.serve import serve
from kbtp_core.cli.smoke import smoke

app = typer.Typer(help="KV cache blocks between LLM serving engines.", no_args_is_help=True, add_completion=False)
app.command()(bench)
app.command()(serve)
app.command()(smoke)
app.add_typer(ctl.app, name="ctl")


@app.command()
def version() -> None:
    """Print the version of KBTP and of what it runs on."""
    console = Console()
    console.print(f"kbtp {kbtp_core.__version__}", highlight=False)
    console.print(f"Python {platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}", highlight=False)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def demo(context: typer.Context) -> None:
    """Run prefill and decode in two real vLLM servers on this machine; arguments go to the demo."""
    script = Path(kbtp_core.__file__).parent.parent / "examples" / "disagg_vllm" / "demo.py"
    if not script.exists():
        Console(stderr=True).print(
            "The demo is part of the source tree, and this is an installed package.\n"
            "Get the source tree and run `make demo` in it: that also sets up vLLM for the CPU.",
            highlight=False,
        )
        raise typer.Exit(2)
    sys.argv = [str(script), *context.args]
    runpy.run_path(str(script), run_name="__main__")
