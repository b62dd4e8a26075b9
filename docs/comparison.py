"""Draws docs/comparison.png from the table in docs/comparison.md."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent


def main() -> None:
    """Read the table's rows and draw the last three columns as bars."""
    text = (DOCS / "comparison.md").read_text()
    rows = re.findall(r"^\| `?([\w ]+?)`? +\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+)", text, re.M)
    names = [row[0] for row in rows]
    titles = ("step, bound by computing", "step, bound by traffic", "peak memory")
    figure, panes = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True, layout="constrained")
    colors = ["#3b6ea5" if name.startswith("zero") else "#b0b7bf" for name in names]
    for column, (pane, title) in enumerate(zip(panes, titles, strict=True), start=1):
        values = [float(row[column]) for row in rows]
        pane.barh(names, values, color=colors)
        pane.bar_label(pane.containers[0], fmt="%.2f", padding=2, fontsize=8)
        pane.set_title(title, fontsize=10)
        pane.set_xlim(0, max(values) * 1.18)
        pane.set_xlabel("x DDP" if column < 3 else "x parameters in fp32", fontsize=8)
        pane.spines[["top", "right"]].set_visible(False)
    panes[0].invert_yaxis()
    figure.savefig(DOCS / "comparison.png", dpi=130)


if __name__ == "__main__":
    main()
