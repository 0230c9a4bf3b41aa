"""Set up the environment that runs this script for work on KBTP: the package, editable, and the tools that check it."""

from __future__ import annotations

from steps import Steps


def main() -> None:
    steps = Steps("dev")
    steps.kbtp("[dev]")
    steps.finish()


if __name__ == "__main__":
    main()
