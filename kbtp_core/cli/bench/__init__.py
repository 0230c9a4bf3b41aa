"""`kbtp bench`: LOAD and ALLOC_STORE between two real processes, against plain TCP in the same run.

This process is the initiator, a child is the target; both use the software RNIC on 127.0.0.1. `plan` says what is measured,
`peer` is the child, `kbtp` and `baseline` are the sides, `measure` alternates them, `report` shows the figures. `clients` and
`interpreter` measure what no single case shows, `large` and `round_trip` what large and small messages cost against plain TCP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kbtp_core.cli.bench import plan
from kbtp_core.errors import KbtpError


def bench(
    sizes: Annotated[str, typer.Option(help="Block sizes, comma-separated.")] = "4KiB,64KiB,1MiB",
    batches: Annotated[str, typer.Option(help="Blocks in flight at once, comma-separated.")] = "1,32",
    ops: Annotated[str, typer.Option(help="Operations, comma-separated: load, alloc_store.")] = "load,alloc_store",
    seconds: Annotated[float, typer.Option(help="Measured time of each side of each case.")] = 2.0,
    pool: Annotated[str, typer.Option(help="Working set on both ends.")] = "64MiB",
    congestion_control: Annotated[str, typer.Option(help="Of all TCP connections, where the kernel allows it.")] = "cubic",
    stripes: Annotated[int, typer.Option(help="Connections of the measured session; its device has as many threads.")] = 1,
    extras: Annotated[
        bool,
        typer.Option(help="Also the target in Python, two clients, a load of 10,000 blocks, 1 MiB without CRCs, round trips."),
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.", dir_okay=False)] = None,
) -> None:
    """Measure KBTP on this machine, against plain TCP in the same run."""
    console = Console()
    try:
        what = plan.Plan(plan.parse_cases(ops, sizes, batches), seconds, plan.parse_size(pool), congestion_control, stripes, extras)
        from kbtp_core.cli.bench import measure, peer, report  # late: no other command needs native code

        with peer.Peer(what.pool_bytes, what.congestion_control) as target, console.status("starting") as status:
            run = measure.Bench(what, target)
            rows = []
            for number, case in enumerate(what.cases, 1):
                status.update(f"{number} of {len(what.cases)}: {case.op.value} {plan.format_size(case.block_bytes)} × {case.batch}")
                rows.append(run.run_case(case))
            if what.has_extras:
                status.update("the target in Python, two clients, the interpreter, large blocks, round trips")
            result = run.finish(rows)
    except (KbtpError, OSError) as error:
        Console(stderr=True).print(f"kbtp bench: {error}", highlight=False)
        raise typer.Exit(1) from None
    report.print_result(console, result)
    if json is not None:
        json.write_text(report.to_json(what, result))
