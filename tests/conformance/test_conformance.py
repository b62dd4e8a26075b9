"""Whatever runs under ddp runs under zero1, zero2 and zero3, with the same numbers."""

from __future__ import annotations

import cases_access  # noqa: F401
import cases_callbacks  # noqa: F401
import cases_compile  # noqa: F401
import cases_evaluation  # noqa: F401
import cases_graph  # noqa: F401
import cases_optimization  # noqa: F401
import cases_transformers  # noqa: F401
import pytest
from harness import CASES, RESULTS, compare


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CASES)
def test_equals_ddp_at_two_ranks(name: str, precision: str) -> None:
    case = CASES[name]
    verdicts = compare(case, 2, precision)
    RESULTS[f"{name}, {precision}"] = verdicts
    for stage, verdict in verdicts.items():
        exact = int(stage[-1]) in case.exact
        limit = 0.0 if exact else 1e-5
        assert verdict.worst <= limit, f"{stage}: {verdict.differences[:8]}"


THREE = """
    GanWithToggles TiedLayers Recurrent UnusedLayers RanksUseDifferentLayers CheckpointedPlainly
    OddShapes TwoForwardsThenTwoBackwards Llama
""".split()


@pytest.mark.parametrize("name", THREE)
def test_equals_ddp_within_rounding_at_three_ranks(name: str) -> None:
    for stage, verdict in compare(CASES[name], 3).items():
        assert verdict.worst <= 1e-4, f"{stage}: {verdict.differences[:8]}"
