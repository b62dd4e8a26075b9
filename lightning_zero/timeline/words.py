"""What the page and the picture say in words."""

from __future__ import annotations

from lightning_zero.engine.summary import many
from lightning_zero.timeline.record import Timeline

_EXPLANATIONS = {
    1: "At stage 1 every rank has all parameters, and all gradients until the step. What is cut in "
    "pieces is the optimizer's work: each rank keeps the optimizer state of its slice and updates "
    "that slice; then the ranks gather the new parameters.",
    2: "At stage 2 every rank has all parameters. As soon as the gradients of a unit are complete, "
    "they are reduced, and each rank keeps only its slice; it updates that slice of the "
    "parameters, and then the ranks gather the new ones.",
    3: "At stage 3 every rank keeps a slice of everything. Just before a unit computes, its full "
    "values are gathered from all ranks; right after, they are freed, so that only a unit or two "
    "are whole at a time. Gradients are reduced to slices as soon as they are complete.",
}


def headline(timeline: Timeline) -> str:
    """Name what is shown."""
    ranks = many(timeline.world_size, "rank")
    return f"ZeRO stage {timeline.stage} on {ranks}, step {timeline.step}"


def explanation(timeline: Timeline) -> str:
    """Say for a newcomer what is to be seen."""
    if timeline.world_size == 1:
        return "One rank has everything: there is nothing to gather and nobody to wait for."
    return _EXPLANATIONS[timeline.stage]
