"""Prints one table of the conformance suite at the end of a run."""

from __future__ import annotations

from typing import Any

from harness import RESULTS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show, for each behaviour and stage, the largest difference to ddp on any rank."""
    if not RESULTS:
        return
    terminalreporter.section("largest difference to ddp, 2 ranks")
    width = max(map(len, RESULTS))
    for name, verdicts in RESULTS.items():
        cells = (
            "equal" if verdict.worst == 0 else f"{verdict.worst:.0e}"
            for verdict in verdicts.values()
        )
        terminalreporter.write_line(f"{name:{width}s}  " + "  ".join(f"{c:>7s}" for c in cells))
