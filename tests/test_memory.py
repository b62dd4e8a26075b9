"""What a rank holds, counted from the storages that exist, is what the table of placements says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from parity import TRANSPORTS, talk_over
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_zero.engine import engine as engine_module
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.numerics import Cast, Numerics
from ranks import run_ranks

WIDTH = 128
DEPTH = 8
LAYER = (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of one layer, which is one unit; 2 and 4 ranks divide it without padding."""
GRADIENT = WIDTH * WIDTH * 4
"""Bytes of the one gradient that autograd holds until the engine takes it over."""
MESSAGES = 1024
"""Bytes that flags and other small messages between the ranks may take, at most."""
ACTIVATIONS = 5 * DEPTH * WIDTH * 4
"""Bytes of what forward saves for backward and of small temporaries, a third of a unit."""


class LiveStorages(TorchDispatchMode):
    """Knows every storage that operations have made, and counts them after each operation.

    It holds weak references, so it keeps no storage alive, and sees those that only autograd or a
    collective holds. A storage counts with the size that it has when it is counted.

    Args:
        *inputs: Tensors that do not count.

    Attributes:
        peak: The most bytes that there were after an operation since `restart`.
    """

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._references: dict[int, int] = {}
        self._inputs = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.watch(leaf)
        self.peak = max(self.peak, self.total())
        return result

    def watch(self, tensor: Tensor) -> None:
        """Count the storage of a tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        if storage._cdata not in self._references and storage._cdata not in self._inputs:
            self._references[storage._cdata] = storage._weak_ref()

    def alive(self) -> list[torch.UntypedStorage]:
        """List the storages that exist."""
        found = []
        for key, reference in list(self._references.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(reference)
                del self._references[key]
            else:
                found.append(storage)
        return found

    def total(self) -> int:
        """Count the bytes that exist."""
        return sum(storage.nbytes() for storage in self.alive())

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = 0


class Stack(nn.Module):
    """Equal layers, which may be registered in another order than they are used in."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
        self.order = range(DEPTH)[::-1] if reverse else range(DEPTH)

    def forward(self, batch: Tensor) -> Tensor:
        for number in self.order:
            batch = torch.tanh(self.layers[number](batch))
        return batch.square().mean()


@dataclass(frozen=True)
class Table:
    """The table of placements in bytes, for Adam in fp32.

    Attributes:
        parameters: Between uses.
        gradients: Between backward and step.
        states: Of the optimizer.
    """

    parameters: float
    gradients: float
    states: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.states


def table(stage: int, world_size: int) -> Table:
    """Look up what a stage holds, for all layers and without padding."""
    whole, share = DEPTH * LAYER, DEPTH * LAYER / world_size
    counters = DEPTH * 2 * 4  # Adam's ``step`` of each parameter
    return {
        1: Table(whole, whole, 2 * share + counters),
        2: Table(whole, share, 2 * share + counters),
        3: Table(share, share, 2 * share + counters),
    }[stage]


def half_table(stage: int, world_size: int) -> Table:
    """Look up what a stage holds with half-precision working values and fp32 masters."""
    numel = DEPTH * LAYER / 4
    working = numel * 2 / (world_size if stage == 3 else 1)
    share = numel * 4 / world_size
    counters = DEPTH * 2 * 4
    return Table(working + share, share, 2 * share + counters)


@dataclass
class Step:
    """Bytes that exist during one step.

    Attributes:
        before: At rest, after ``zero_grad``.
        forward: At the worst moment of forward.
        backward: At the worst moment of backward.
        step: At the worst moment of the optimizer's step.
        after: At rest after it.
        waiting: Between backward and step, if gradients are in half precision then.
    """

    before: int
    forward: int
    backward: int
    step: int
    after: int
    waiting: int


def train(
    rank: int,
    world_size: int,
    stage: int,
    build: Callable[[], nn.Module] = Stack,
    numerics: Numerics | None = None,
) -> tuple[int, list[Step]]:
    """Train for three steps; return the bytes at rest before them, and those of each step."""
    generator = torch.Generator().manual_seed(rank)
    dtype = next(build().parameters()).dtype
    batches = [torch.randn(1, WIDTH, generator=generator).to(dtype) for _ in range(3)]
    steps: list[Step] = []
    waiting: list[int] = []
    with LiveStorages(*batches) as live:
        module = build()
        engine = ZeroEngine(
            module,
            stage=stage,
            auto_wrap_policy="layers",
            bucket_mb=LAYER / 4 * dtype.itemsize / 2**20,
            numerics=numerics,
        )
        assert [unit.layout.flat_numel for unit in engine.units] == [LAYER // 4] * DEPTH
        at_rest = live.total()
        optimizer = torch.optim.Adam(module.parameters())
        engine.attach(optimizer)
        for batch in batches:
            optimizer.zero_grad()
            before = live.total()
            live.restart()
            with engine.forward(), autocast(numerics):
                loss = module(batch)
            forward = live.peak
            live.restart()
            loss.backward()
            if engine.units[0].grad_dtype.itemsize == 2:
                engine.schedule.finish()
                assert all(unit.grad_shard.dtype == unit.grad_dtype for unit in engine.units)
                waiting.append(live.total())
            engine.finish_gradients()
            backward = live.peak
            del loss
            live.restart()
            optimizer.step()
            held = waiting[-1] if waiting else 0
            steps.append(Step(before, forward, backward, live.peak, live.total(), held))
    return at_rest, steps


def autocast(numerics: Numerics | None) -> torch.autocast:
    """Make the context of a forward pass."""
    dtype = None if numerics is None else numerics.autocast
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("cast", ["auto", "all"])
def test_half_precision_working_values_take_two_bytes_beside_sharded_masters(
    cast: Cast, stage: int, world_size: int
) -> None:
    expected = half_table(stage, world_size)
    numerics = Numerics(autocast=torch.bfloat16, cast=cast)
    for at_rest, steps in run_ranks(train, world_size, stage, numerics=numerics):
        assert_at_rest(at_rest, expected.parameters, world_size)
        for step in steps:
            assert_at_rest(step.after, expected.total, world_size)
            assert step.forward <= expected.total + 3 * LAYER + ACTIVATIONS
            # Autograd holds one gradient in half precision and in fp32.
            assert step.backward <= expected.total + 3 * LAYER + 2 * GRADIENT + ACTIVATIONS
            assert step.step <= expected.total + 3 * LAYER
            if cast == "all":  # 2Ψ + 2Ψ + 12Ψ/N, 2Ψ + 14Ψ/N, 16Ψ/N (arXiv 1910.02054, figure 1)
                assert_paper(step, stage, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("master", [None, torch.float32])
def test_true_half_precision_takes_two_bytes_and_its_masters_four(
    master: torch.dtype | None, stage: int, world_size: int
) -> None:
    numel = DEPTH * LAYER / 4
    width = 2 if master is None else 4
    params = numel * 2 / (world_size if stage == 3 else 1)
    masters = 0 if master is None else numel * 4 / world_size
    shares = 3 * width * numel / world_size  # gradients, as the step needs them, and two states
    counters = DEPTH * 2 * 4
    runs = run_ranks(
        train,
        world_size,
        stage,
        build=lambda: Stack().bfloat16(),
        numerics=Numerics(master=master),
    )
    for at_rest, steps in runs:
        assert_at_rest(at_rest, params + masters, world_size)
        for step in steps:
            assert_at_rest(step.after, params + masters + shares + counters, world_size)


def assert_paper(step: Step, stage: int, world_size: int) -> None:
    """Assert that a backward pass fits in the paper's bytes, a few units aside."""
    numel = DEPTH * LAYER / 4
    grads = 2 / (1 if stage == 1 else world_size)
    params = 2 / (world_size if stage == 3 else 1)
    paper = numel * (params + grads + 12 / world_size)
    assert step.backward <= paper + 3 * LAYER + 2 * GRADIENT + ACTIVATIONS
    assert 0 < step.waiting <= paper + LAYER + MESSAGES


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_are_those_of_the_table_and_at_most_three_units(
    transport: str, stage: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk_over(transport, monkeypatch)
    expected = table(stage, world_size)
    for at_rest, steps in run_ranks(train, world_size, stage):
        assert_at_rest(at_rest, expected.parameters, world_size)
        for number, step in enumerate(steps):
            assert_at_rest(step.after, expected.total, world_size)
            assert step.before <= expected.total + LAYER + MESSAGES, number
            assert step.forward <= expected.total + 3 * LAYER + ACTIVATIONS, number
            assert step.backward <= expected.total + 3 * LAYER + GRADIENT + ACTIVATIONS, number
            assert step.step <= expected.total + 3 * LAYER, number
        assert abs(steps[2].after - steps[1].after) <= MESSAGES  # nothing grows


def assert_at_rest(nbytes: float, expected: float, world_size: int) -> None:
    """Assert that there are as many bytes as expected, but for small messages.

    What the other ranks write their gradients into may be there too, less than one unit.
    """
    lent = LAYER - LAYER / world_size
    found = [0 <= nbytes - expected - more <= MESSAGES for more in (0, lent)]
    assert any(found), (nbytes, expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_order_of_registration_does_not_cost_memory(stage: int) -> None:
    """Gradients come in the order of use; units that wait for each other would hold them whole."""
    expected = table(stage, 2)
    for _, steps in run_ranks(train, 2, stage, build=lambda: Stack(reverse=True)):
        # The first step has no way to know.
        for step in steps[1:]:
            assert step.backward <= expected.total + 3 * LAYER + GRADIENT + ACTIVATIONS


def test_without_gradients_one_unit_and_the_next_are_there_at_a_time() -> None:
    def body(rank: int, world_size: int) -> list[int]:
        peaks = []
        with LiveStorages() as live:
            module = Stack()
            engine = ZeroEngine(module, stage=3, auto_wrap_policy="layers")
            for _ in range(3):
                live.restart()
                with torch.no_grad(), engine.forward():
                    module(torch.zeros(1, WIDTH))
                peaks.append(live.peak)
                assert_at_rest(live.total(), table(3, world_size).parameters, world_size)
        return peaks

    for peaks in run_ranks(body, 2):
        assert max(peaks) <= table(3, 2).parameters + 3 * LAYER + ACTIVATIONS


@pytest.mark.parametrize("world_size", [2, 4])
def test_resting_parameters_hold_no_storage_and_nobody_else_holds_their_values(
    world_size: int,
) -> None:
    def body(rank: int, world_size: int) -> None:
        batch = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(rank))
        with LiveStorages() as live:
            module = Stack()
            engine = ZeroEngine(module, stage=3, auto_wrap_policy="layers")
            optimizer = torch.optim.Adam(module.parameters())
            engine.attach(optimizer)
            moments = [contents(live)]
            for _ in range(2):
                with engine.forward():
                    loss = module(batch)
                loss.backward()
                del loss
                moments.append(contents(live))
                for param in module.parameters():
                    with torch._C.DisableTorchFunctionSubclass():
                        assert param.untyped_storage().nbytes() == 0
                assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in engine.units)
            engine.restore()  # no step was made, so these are the values of every moment
            restored = contents(live)
        weights = [raw(param) for param in module.parameters() if param.dim() == 2]
        assert len(weights) == DEPTH
        for weight in weights:
            for blobs in moments:
                assert not any(weight in blob for blob in blobs)
            assert any(weight in blob for blob in restored)  # the search would find it

    run_ranks(body, world_size)


def contents(live: LiveStorages) -> list[bytes]:
    """Copy what is in every storage that exists."""
    storages = [storage for storage in live.alive() if storage.nbytes()]
    return [
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes() for storage in storages
    ]


def raw(tensor: Tensor) -> bytes:
    """Copy the bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_setting_up_takes_one_unit_at_a_time(stage: int) -> None:
    def body(rank: int, world_size: int) -> None:
        with LiveStorages() as live:
            module = Stack()
            assert live.total() == DEPTH * LAYER
            live.restart()
            engine = ZeroEngine(
                module, stage=stage, auto_wrap_policy="layers", bucket_mb=LAYER / 2**20
            )
            # The module as it was, one unit as it will be, and what is kept of it.
            assert live.peak <= DEPTH * LAYER + 2 * LAYER
            assert_at_rest(live.total(), table(stage, world_size).parameters, world_size)
            assert len(engine.units) == DEPTH

    run_ranks(body, 2)


def test_storages_of_the_users_parameters_are_freed_unit_by_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int, world_size: int) -> None:
        held: list[int] = []
        with LiveStorages() as live:
            module = Stack()
            make = engine_module.Unit

            def observed(*args: Any, **kwargs: Any) -> Any:
                unit = make(*args, **kwargs)
                held.append(live.total())
                return unit

            monkeypatch.setattr(engine_module, "Unit", observed)
            ZeroEngine(module, stage=3, auto_wrap_policy="layers")
        share = LAYER / world_size
        assert len(held) == DEPTH
        for done, total in enumerate(held, start=1):
            assert_at_rest(total, (DEPTH - done) * LAYER + done * share, world_size)

    run_ranks(body, 2)


def test_a_graph_that_waits_for_backward_holds_activations_and_no_parameters() -> None:
    def body(rank: int, world_size: int) -> None:
        with LiveStorages() as live:
            module = Stack()
            engine = ZeroEngine(module, stage=3, auto_wrap_policy="layers")
            for _ in range(3):
                before = live.total()
                with engine.forward():
                    loss = module(torch.zeros(1, WIDTH))
                # Beside them are the two units that backward begins with.
                assert live.total() - before <= 2 * LAYER + ACTIVATIONS
                loss.backward()
                engine.finish_gradients()
                del loss
                for param in module.parameters():
                    param.grad = None

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_graphs_that_never_go_backward_are_freed_with_their_results(stage: int) -> None:
    def body(rank: int, world_size: int) -> None:
        with LiveStorages() as live:
            module = Stack()
            engine = ZeroEngine(module, stage=stage, auto_wrap_policy="layers")
            totals = []
            for _ in range(6):
                with engine.forward():
                    loss = module(torch.zeros(1, WIDTH))
                    # As for a metric: functions of all kinds save their results.
                    hidden = module.layers[0](torch.zeros(WIDTH, WIDTH))
                    unused = torch.softmax(torch.exp(torch.sigmoid(torch.relu(hidden))), -1)
                loss.backward()
                engine.finish_gradients()
                del loss, hidden, unused
                with engine.forward():
                    module(torch.zeros(1, WIDTH))
                engine.schedule.rest()
                totals.append(live.total())
        assert max(totals[2:]) - totals[1] <= MESSAGES, totals

    run_ranks(body, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_have_no_gradient_buffer_and_no_state(stage: int) -> None:
    def body(rank: int, world_size: int) -> None:
        base, adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        base.requires_grad_(False)
        module = nn.ModuleList([base, adapter])
        engine = ZeroEngine(module, stage=stage, auto_wrap_policy="layers")
        optimizer = torch.optim.AdamW(module.parameters())
        engine.attach(optimizer)
        for _ in range(2):
            with engine.forward():
                loss = adapter(base(torch.full((2, 8), rank + 1.0))).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        frozen = [unit for unit in engine.units if unit.slots[0].param is base.weight]
        assert len(frozen) == 1
        assert frozen[0].grad_flat is None
        assert frozen[0].grad_shard is None
        assert base.weight not in optimizer.state
        assert adapter.weight in optimizer.state
        assert frozen[0].shards_parameters == (stage == 3)
        engine.restore()

    run_ranks(body, 2)
