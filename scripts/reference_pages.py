"""Write docs/metrics.md and docs/settings.md out of what the code declares; `--check` fails if one is old."""

from __future__ import annotations

import sys

from pages import ROOT, cell, write_or_check

sys.path[:0] = [str(ROOT), str(ROOT / "connectors")]

from kbtp_core.store.node_metrics import METRICS  # noqa: E402
from kbtp_core.store.settings import ENVIRONMENT_PREFIX, StoreSettings  # noqa: E402

METRICS_HEAD = """# Metrics of a store

`kbtp serve` tells them at `/metrics` of its address for metrics, in Prometheus' text format. This page is made from the declarations in
`kbtp_core/store/node_metrics.py` by `python scripts/reference_pages.py`.

| metric | kind | labels | what |
| --- | --- | --- | --- |
"""
SETTINGS_HEAD = f"""# Settings of a store

Each is a flag of `kbtp serve` (`--some-name VALUE`), a variable of the environment (`{ENVIRONMENT_PREFIX}SOME_NAME`),
and a line of the TOML file that `--config` names (`some_name = value`). Flags win over the environment, and that wins over the file. An
unknown name is an error that names the nearest match. Sizes are written like `4GiB`. At start the store logs every setting and where its
value came from. This page is made from the declaration in `kbtp_core/store/settings.py` by `python scripts/reference_pages.py`.

| setting | default | what |
| --- | --- | --- |
"""


def metrics_page() -> str:
    rows = (f"| `{m.name}` | {m.kind} | {', '.join(m.labels) or '–'} | {cell(m.text)} |\n" for m in METRICS)
    return METRICS_HEAD + "".join(rows)


def settings_page() -> str:
    rows = []
    for name, field in StoreSettings.model_fields.items():
        default = field.get_default()
        shown = getattr(default, "human_readable", lambda value=default: value)()
        text = (
            "–"
            if default in ("", None, ())
            else f"`{str(shown).replace('.0', '')}`"
            if hasattr(default, "human_readable")
            else f"`{shown}`"
        )
        rows.append(f"| `{name}` | {text} | {cell(field.description or '')} |\n")
    return SETTINGS_HEAD + "".join(rows)


def main() -> int:
    pages = ((ROOT / "docs" / "metrics.md", metrics_page()), (ROOT / "docs" / "settings.md", settings_page()))
    return max(write_or_check(page, wanted, "reference_pages.py") for page, wanted in pages)


if __name__ == "__main__":
    sys.exit(main())
