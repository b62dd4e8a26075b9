"""What user code sees of parameters and gradients is what it sees under DDP.

Most tests train twins: one module under DDP, its copy under the engine, with the same code run on
both. Whatever the code reads or leaves behind has to agree in every bit.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import assert_same_bits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)
from torch.utils.checkpoint import checkpoint

from lightning_zero.engine.engine import ZeroEngine
from ranks import run_ranks

STAGES = (1, 2, 3)
WIDTH = 6


class Stack(nn.Sequential):
    """Five layers, or those given, each a unit of its own at stage 3."""

    def __init__(self, *layers: Any) -> None:
        super().__init__(*(layers or [nn.Linear(WIDTH, WIDTH) for _ in range(5)]))


class Tied(nn.Sequential):
    """Three layers, of which the first and the last share a weight and one has a frozen one."""

    def __init__(self) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self[2].weight = self[0].weight
        self[1].weight.requires_grad_(False)


class Twins:
    """The same module twice, under DDP and under the engine.

    Args:
        rank: This rank.
        stage: Of the engine.
        build: Makes the module.
        by_hand: Whether to leave DDP out where it cannot do what is tried. ``average`` then does
            what DDP would, after each backward pass.
        unused: Whether DDP looks for parameters without gradient.

    Attributes:
        ours: The one under the engine.
        theirs: The one under DDP.
        engine: The engine.
    """

    def __init__(
        self,
        rank: int,
        stage: int,
        build: Callable[[], nn.Module] = Stack,
        *,
        by_hand: bool = False,
        unused: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.theirs = build()
        self.ours = copy.deepcopy(self.theirs)
        self._by_hand = by_hand
        self._forward: nn.Module = self.theirs
        if not by_hand:
            self._forward = DistributedDataParallel(self.theirs, find_unused_parameters=unused)
        self.engine = ZeroEngine(
            self.ours, stage=stage, auto_wrap_policy="layers", bucket_mb=1e-4, stall_timeout=20.0
        )
        self.optimizers = [
            torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
            for module in self.both
        ]
        self.engine.attach(self.optimizers[0])
        self._generator = torch.Generator().manual_seed(rank)

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        """Ours and theirs."""
        return self.ours, self.theirs

    @property
    def params(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of parameters, ours and theirs."""
        return zip(self.ours.parameters(), self.theirs.parameters(), strict=True)

    def batch(self) -> Tensor:
        """Draw what this rank sees next."""
        return torch.randn(3, WIDTH, generator=self._generator)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Run both forward passes on one batch."""
        batch = self.batch()
        with self.engine.forward():
            ours = self.ours(batch).square().mean()
        return ours, self._forward(batch).square().mean()

    def backward(self) -> None:
        """Run both forward and backward passes."""
        for loss in self.losses():
            loss.backward()
        self.average()

    def average(self) -> None:
        """Average their gradients, if DDP does not."""
        for param in self.theirs.parameters():
            if self._by_hand and param.grad is not None:
                total = param.grad.detach().clone()
                dist.all_reduce(total)
                param.grad = total / 2

    def step(self) -> None:
        """Run both optimizers' steps."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear both gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def train(self, steps: int = 1) -> None:
        """Run whole steps."""
        for _ in range(steps):
            self.zero_grad()
            self.backward()
            self.step()

    def on_both(self, action: Callable[[nn.Module], Any]) -> None:
        """Run user code on both."""
        for module in self.both:
            action(module)

    def assert_same(self, what: str = "weights") -> None:
        """Compare weights and gradients; gathers at stage 3, so every rank has to call it."""
        ours, theirs = (
            {name: param.detach().clone() for name, param in module.named_parameters()}
            for module in self.both
        )
        assert_same_bits(ours, theirs, what)
        for name, param in self.ours.named_parameters():
            assert (param.grad is None) == (self.theirs.get_parameter(name).grad is None), name
        grads = [
            {
                name: param.grad.clone()
                for name, param in module.named_parameters()
                if param.grad is not None
            }
            for module in self.both
        ]
        if grads[1]:
            assert_same_bits(grads[0], grads[1], f"gradients, {what}")

    def close(self) -> None:
        """Compare once more what the engine gives back."""
        self.engine.restore()
        self.engine.close()
        ours, theirs = (dict(module.named_parameters()) for module in self.both)
        assert_same_bits(ours, theirs, "restored weights")
        assert all(type(param) is nn.Parameter for param in ours.values())


def on_twins(
    body: Callable[[Twins], None],
    stages: Sequence[int] = STAGES,
    build: Callable[[], nn.Module] = Stack,
    **options: bool,
) -> None:
    """Run a test on twins at every stage, on two ranks."""

    def rank_body(rank: int, world_size: int) -> None:
        for stage in stages:
            twins = Twins(rank, stage, build, **options)
            try:
                body(twins)
                twins.close()
            except BaseException as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"(at stage {stage})")
                raise

    run_ranks(rank_body, 2)


def numbers(text: str) -> list[str]:
    """Find the numbers in a text."""
    return re.findall(r"-?\d+\.\d+(?:e[-+]\d+)?", text)


@contextlib.contextmanager
def no_gathers(engine: ZeroEngine) -> Iterator[None]:
    """Assert that what is done inside moves nothing."""
    before = copy.copy(engine.collectives.traffic)
    yield
    assert engine.collectives.traffic == before


# --- Parameters at rest ---


def test_resting_parameters_answer_questions_about_themselves_without_gathering() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        with no_gathers(twins.engine):
            for ours, theirs in twins.params:
                for name in (
                    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim"),
                    *("nbytes", "itemsize", "is_cuda", "is_sparse", "grad_fn"),
                ):
                    assert getattr(ours, name) == getattr(theirs, name), name
                for name in (
                    *("numel", "nelement", "size", "dim", "stride", "element_size"),
                    *("is_contiguous", "is_floating_point", "is_complex", "__len__", "get_device"),
                ):
                    assert getattr(ours, name)() == getattr(theirs, name)(), name
                assert ours.size(0) == theirs.size(0)
                assert isinstance(ours, nn.Parameter)
                assert torch.is_tensor(ours)
                assert torch.numel(ours) == theirs.numel()
                assert torch.is_floating_point(ours)
                assert ours in {ours}
                zeros = torch.zeros_like(ours)
                assert zeros.shape == ours.shape
                assert not zeros.any()
                assert ours.new_ones(3).sum() == 3
                assert torch.empty_like(ours).dtype == ours.dtype
            count = sum(param.numel() for param in twins.ours.parameters())
            assert count == sum(param.numel() for param in twins.theirs.parameters())
            twins.ours.requires_grad_(True)
            twins.ours.train().eval()
            twins.ours.zero_grad()

    on_twins(body)


def test_every_way_to_read_a_resting_parameter_gives_its_full_values() -> None:
    reads: dict[str, Callable[[nn.Parameter], Any]] = {
        "detach": lambda p: p.detach(),
        "data": lambda p: p.data,
        "clone": lambda p: p.clone(),
        "view": lambda p: p.view(-1),
        "flatten": lambda p: p.flatten(),
        "index": lambda p: p[1],
        "add": lambda p: p + 1,
        "function": lambda p: torch.add(p, 1),
        "method": lambda p: p.mul(2),
        "reflected": lambda p: 1 - p,
        "transpose": lambda p: p.t(),
        "property": lambda p: p.T if p.dim() == 2 else p,
        "to": lambda p: p.to(torch.float64),
        "cpu": lambda p: p.cpu(),
        "double": lambda p: p.double(),
        "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
        "list": lambda p: torch.tensor(p.tolist()),
        "norm": lambda p: p.norm(),
        "item": lambda p: torch.tensor(p.sum().item()),
        "iterate": lambda p: torch.stack(list(p)),
        "copy to": lambda p: torch.empty(p.shape).copy_(p),
        "out": lambda p: torch.no_grad()(torch.neg)(p, out=torch.empty(p.shape)),
        "linear": lambda p: F.linear(torch.ones(2, p.shape[-1]), p.view(-1, p.shape[-1])),
        "comparison": lambda p: p > 0,
        "keyword": lambda p: torch.mul(input=p, other=p),
        "list of itself": lambda p: torch.cat([p, p]),
        "einsum": lambda p: torch.einsum("...i,...i->...", p, p),
    }

    def body(twins: Twins) -> None:
        twins.train()
        for name, read in reads.items():
            twins.train()  # back at rest
            for ours, theirs in twins.params:
                value, expected = read(ours), read(theirs)
                assert isinstance(value, nn.Parameter) == isinstance(expected, nn.Parameter), name
                assert_same_bits({name: value.detach()}, {name: expected.detach()}, name)
                assert numbers(repr(ours)) == numbers(repr(theirs))

    on_twins(body)


@pytest.mark.parametrize("units", [2, 3, 5])
def test_one_operation_may_take_resting_parameters_of_any_number_of_units(units: int) -> None:
    operations: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
        "stack": lambda params: torch.stack(params),
        "cat": lambda params: torch.cat(params),
        "foreach": lambda params: torch.stack(torch._foreach_norm(params)),
        "vector": lambda params: parameters_to_vector(params),
        "norm": lambda params: get_total_norm(params),
        "dot": lambda params: torch.linalg.multi_dot(params),
    }

    def body(twins: Twins) -> None:
        for name, operation in operations.items():
            twins.train()
            ours, theirs = (
                operation([layer.weight for layer in list(module)[:units]]).detach()
                for module in twins.both
            )
            assert_same_bits({name: ours}, {name: theirs}, name)

    on_twins(body)


def test_copies_are_ordinary_full_and_independent() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        copies = [copy.deepcopy(module) for module in twins.both]
        stored = [pickle.loads(pickle.dumps(module)) for module in twins.both]
        saved = []
        for module in twins.both:
            file = io.BytesIO()
            torch.save(module.state_dict(), file)
            saved.append(torch.load(io.BytesIO(file.getvalue())))
        states = [copy.deepcopy(module.state_dict()) for module in twins.both]
        twins.train(2)
        for ours, theirs in (copies, stored):
            assert_same_bits(dict(ours.named_parameters()), dict(theirs.named_parameters()), "copy")
            for param in ours.parameters():
                assert type(param) is nn.Parameter
                assert param.requires_grad
            # A copy is not the engine's: it runs and trains for itself.
            batch = twins.batch()
            with no_gathers(twins.engine):
                for module in (ours, theirs):
                    module(batch).sum().backward()
                    torch.optim.SGD(module.parameters(), lr=0.1).step()
            assert_same_bits(dict(ours.named_parameters()), dict(theirs.named_parameters()), "copy")
        assert_same_bits(saved[0], saved[1], "saved")
        assert_same_bits(states[0], states[1], "state")
        twins.assert_same()

    on_twins(body)


def test_a_copy_keeps_what_is_tied_and_what_is_frozen() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        for ours in (copy.deepcopy(twins.ours), pickle.loads(pickle.dumps(twins.ours))):
            assert ours[2].weight is ours[0].weight
            assert not ours[1].weight.requires_grad

    on_twins(body, build=Tied)


def test_a_state_dict_has_full_values_that_may_be_held_and_loaded() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        states = [module.state_dict() for module in twins.both]
        assert_same_bits(states[0], states[1], "state dict")
        kept = [{name: value.clone() for name, value in state.items()} for state in states]
        twins.train(2)
        for value in states[0].values():  # whatever they show now, they can be read
            assert value.untyped_storage().nbytes() >= value.numel() * 4
            assert value.isfinite().all()
        for module, state in zip(twins.both, kept, strict=True):
            module.load_state_dict(state)
        twins.assert_same("loaded")
        twins.train(2)
        twins.assert_same("trained on")

    on_twins(body)


def test_values_held_in_variables_over_a_step_never_crash() -> None:
    holds: list[Callable[[nn.Parameter], Tensor]] = [
        lambda p: p.detach(),
        lambda p: p.data,
        lambda p: p.view(-1),
        lambda p: p.t() if p.dim() == 2 else p[1:],
        lambda p: p[0],
        lambda p: p.expand(2, *p.shape),
    ]

    def body(twins: Twins) -> None:
        held: list[Any] = []
        for _ in range(3):
            held += [hold(param) for param in twins.ours.parameters() for hold in holds]
            twins.train()
            for value in held:
                total = value.sum()
                assert abs(float(total)) < 1e3
        twins.assert_same()
        del held, value, total
        twins.train()
        if twins.engine.stage == 3:  # and once dropped, they keep no memory
            for param in twins.ours.parameters():
                with torch._C.DisableTorchFunctionSubclass():
                    assert param.untyped_storage().nbytes() == 0

    on_twins(body)


def test_arrays_that_share_memory_with_parameters_never_crash() -> None:
    def body(twins: Twins) -> None:
        held = []
        for _ in range(3):
            twins.train()
            for ours, theirs in twins.params:
                mine, other = ours.detach().numpy(), theirs.detach().cpu().numpy()
                assert mine.tobytes() == other.tobytes()
                held.append(mine)
        assert all(abs(float(array.sum())) < 1e3 for array in held)
        twins.assert_same()
        del held, mine
        twins.train()
        twins.assert_same()

    on_twins(body)


def test_a_value_that_was_computed_before_forward_can_go_backward_after_it() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        twins.zero_grad()
        values = [
            (module[0].weight * module[1].weight * module[2].weight).sum() for module in twins.both
        ]
        for loss, value in zip(twins.losses(), values, strict=True):
            (loss + value).backward()
        twins.average()
        twins.step()
        twins.assert_same()

    on_twins(body, by_hand=True)


def test_moving_a_module_to_where_it_is_changes_nothing() -> None:
    def body(twins: Twins) -> None:
        twins.train()
        before = {name: id(param) for name, param in twins.ours.named_parameters()}
        for module in twins.both:
            module.to("cpu")
            module.float()
            module.cpu()
            module.to(torch.float32)
        assert before == {name: id(param) for name, param in twins.ours.named_parameters()}
        twins.assert_same()
        twins.train()
        twins.assert_same()

    on_twins(body)


def test_changing_dtype_during_training_is_refused_by_name() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            module = Stack()
            ZeroEngine(module, stage=stage, auto_wrap_policy="layers")
            with pytest.raises(RuntimeError, match=r"0\.weight\.data cannot change .* dtype"):
                module.double()

    run_ranks(body, 2)


# --- Gradients ---


def test_gradients_are_none_before_backward_and_ddps_after() -> None:
    def body(twins: Twins) -> None:
        for _ in range(3):
            assert all(ours.grad is None and theirs.grad is None for ours, theirs in twins.params)
            losses = twins.losses()
            assert all(ours.grad is None for ours, _ in twins.params)
            for loss in losses:
                loss.backward()
            with no_gathers(twins.engine):
                for ours, theirs in twins.params:
                    assert ours.grad is not None
                    assert ours.grad.shape == theirs.grad.shape
                    assert ours.grad.dtype == theirs.grad.dtype
                    assert ours.grad.numel() == theirs.grad.numel()
                    assert ours.grad is ours.grad
                    assert not ours.grad.requires_grad
            for ours, theirs in twins.params:
                assert_same_bits({"": ours.grad.clone()}, {"": theirs.grad.clone()}, "gradient")
            twins.step()
            twins.assert_same()
            twins.zero_grad()

    on_twins(body)


def test_gradients_of_several_backward_passes_add_up() -> None:
    def body(twins: Twins) -> None:
        twins.backward()
        twins.assert_same("once")
        twins.backward()
        twins.assert_same("twice, read in between")
        twins.step()
        twins.assert_same("after the step")
        twins.zero_grad()
        twins.backward()
        twins.backward()
        twins.step()
        twins.assert_same("twice, not read in between")

    # DDP and stage 1 average the sum so far, the other stages each pass by itself.
    on_twins(body, stages=(1,))


def test_a_graph_may_go_backward_twice_and_two_graphs_together() -> None:
    def body(twins: Twins) -> None:
        losses = twins.losses()
        for loss in losses:
            loss.backward(retain_graph=True)
        twins.zero_grad()
        for loss in losses:
            loss.backward()
        twins.average()
        twins.step()
        twins.assert_same("one graph twice")
        twins.zero_grad()
        for first, second in zip(twins.losses(), twins.losses(), strict=True):
            (first + second).backward()
        twins.average()
        twins.step()
        twins.assert_same("two graphs together")

    on_twins(body, by_hand=True)


def test_zeroing_gradients_in_place_is_not_the_same_as_clearing_them() -> None:
    def body(twins: Twins) -> None:
        twins.train(2)
        twins.zero_grad(set_to_none=False)
        for ours, theirs in twins.params:
            assert ours.grad is not None
            assert not ours.grad.any()
            assert not theirs.grad.any()
        twins.step()  # momentum and decay go on
        twins.assert_same("stepped on zeros")
        twins.backward()
        twins.step()
        twins.assert_same("added to zeros")
        twins.zero_grad()
        twins.step()  # nothing moves
        twins.assert_same("stepped on nothing")

    on_twins(body)


def edit_in_place(module: nn.Module) -> None:
    for number, param in enumerate(module.parameters()):
        param.grad.mul_(number + 0.5)


def edit_through_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad.data.clamp_(-0.01, 0.01)


def edit_a_part(module: nn.Module) -> None:
    module[1].weight.grad[2:4] = 0.25
    module[2].bias.grad[0] += 1


def edit_and_hold(module: nn.Module) -> None:
    held = [param.grad for param in module.parameters()]
    torch._foreach_mul_(held, 0.5)


def assign_a_tensor(module: nn.Module) -> None:
    module[0].weight.grad = torch.full((WIDTH, WIDTH), 0.125)
    module[3].bias.grad = module[3].bias.grad * 3


def assign_itself(module: nn.Module) -> None:
    for param in module.parameters():
        param.grad = param.grad


def drop_some(module: nn.Module) -> None:
    module[1].weight.grad = None
    module[4].bias.grad = None


def swap_two(module: nn.Module) -> None:
    first, second = module[0].weight, module[1].weight
    first.grad, second.grad = second.grad, first.grad


def clip_norm(module: nn.Module) -> None:
    norm = clip_grad_norm_(module.parameters(), 0.01)
    module.norm = norm.item()


def clip_norm_without_foreach(module: nn.Module) -> None:
    norm = clip_grad_norm_(module.parameters(), 0.01, norm_type=1.0, foreach=False)
    module.norm = norm.item()


def clip_largest(module: nn.Module) -> None:
    norm = clip_grad_norm_(module.parameters(), 0.001, norm_type=float("inf"))
    module.norm = norm.item()


def clip_values(module: nn.Module) -> None:
    clip_grad_value_(module.parameters(), 0.005)


@pytest.mark.parametrize(
    "edits",
    [
        (edit_in_place, edit_through_data, edit_a_part, edit_and_hold),
        (assign_a_tensor, assign_itself, drop_some, swap_two),
        (clip_norm, clip_norm_without_foreach, clip_largest, clip_values),
    ],
)
def test_what_user_code_does_to_gradients_is_what_the_step_takes(
    edits: Sequence[Callable[[nn.Module], None]],
) -> None:
    def body(twins: Twins) -> None:
        for edit in edits:
            for read_again in (False, True):
                twins.zero_grad()
                twins.backward()
                twins.on_both(edit)
                if read_again:
                    twins.assert_same(f"{edit.__name__}, read again")
                twins.step()
                twins.assert_same(edit.__name__)
                assert getattr(twins.ours, "norm", 0) == getattr(twins.theirs, "norm", 0)

    on_twins(body)


def test_gradients_add_to_what_user_code_has_made_of_them() -> None:
    def body(twins: Twins) -> None:
        for edit in (edit_in_place, assign_a_tensor, drop_some):
            twins.zero_grad()
            twins.backward()
            twins.on_both(edit)
            twins.backward()
            twins.step()
            twins.assert_same(edit.__name__)

    # DDP and stage 1 average the sum so far, the other stages each pass by itself.
    on_twins(body, stages=(1,))


def test_clipping_by_the_engine_is_global_over_ranks() -> None:
    def body(twins: Twins) -> None:
        for norm_type in (2.0, 1.0, float("inf")):
            twins.zero_grad()
            twins.backward()
            ours = twins.engine.clip_by_norm(twins.ours.parameters(), 0.01, norm_type)
            theirs = clip_grad_norm_(twins.theirs.parameters(), 0.01, norm_type)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
            for mine, other in twins.params:
                torch.testing.assert_close(mine.grad.clone(), other.grad, rtol=1e-5, atol=1e-9)
        twins.zero_grad()
        twins.backward()
        twins.engine.clip_by_value(twins.ours.parameters(), 0.005)
        clip_grad_value_(twins.theirs.parameters(), 0.005)
        for mine, other in twins.params:
            torch.testing.assert_close(mine.grad.clone(), other.grad, rtol=1e-4, atol=1e-7)

    def rank_body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            body(Twins(rank, stage))

    run_ranks(rank_body, 2)


def test_a_gradient_read_too_late_is_an_error_and_not_a_wrong_value() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage)
            twins.backward()
            unread, read = twins.ours[0].weight.grad, twins.ours[1].weight.grad
            values = read.clone()
            twins.step()
            twins.zero_grad()
            with pytest.raises(RuntimeError, match=r"0\.weight was cleared or stepped"):
                unread.sum()
            assert torch.equal(read, values)

    run_ranks(body, 2)


def test_a_gradient_of_another_shape_is_refused() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage)
            with pytest.raises(RuntimeError, match=r"0\.weight\.grad was set to .* shape \(2,\)"):
                twins.ours[0].weight.grad = torch.zeros(2)

    run_ranks(body, 2)


def test_hooks_on_parameters_see_the_local_gradient_and_may_change_it() -> None:
    seen: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    def body(twins: Twins) -> None:
        twins.on_both(lambda module: module[2].weight.register_hook(hook))
        for _ in range(2):
            seen.clear()
            twins.zero_grad()
            twins.backward()
            assert len(seen) == 2
            assert_same_bits({"": seen[0]}, {"": seen[1]}, "local gradients")
            assert not torch.equal(seen[0] * 2, twins.theirs[2].weight.grad)
            twins.step()
            twins.assert_same()

    on_twins(body)


# --- Writing to weights ---


@torch.no_grad()
def clamp(module: nn.Module) -> None:
    for param in module.parameters():
        param.clamp_(-0.1, 0.1)


def clamp_through_data(module: nn.Module) -> None:
    for param in module.parameters():
        param.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def scale(module: nn.Module) -> None:
    for param in module.parameters():
        param.mul_(1.5)


@torch.no_grad()
def scale_together(module: nn.Module) -> None:
    torch._foreach_mul_([module[0].weight, module[1].weight], 0.5)


@torch.no_grad()
def write_a_part(module: nn.Module) -> None:
    module[1].weight[2, 3] = 7.0
    module[2].weight[1].zero_()
    module[3].weight.view(-1)[5:9].fill_(0.5)
    module[4].weight.diagonal().add_(1)
    module[0].bias.detach()[1:3] = 0.25


def initialize(module: nn.Module) -> None:
    torch.manual_seed(5)
    nn.init.xavier_uniform_(module[0].weight)
    nn.init.zeros_(module[1].bias)
    nn.init.orthogonal_(module[2].weight)


def reset(module: nn.Module) -> None:
    torch.manual_seed(6)
    module.apply(lambda child: child.reset_parameters() if hasattr(child, "weight") else None)


def assign_data(module: nn.Module) -> None:
    module[0].weight.data = torch.full((WIDTH, WIDTH), 0.125)
    module[1].weight.data = module[1].weight.data * 0.5


def from_vector(module: nn.Module) -> None:
    vector = parameters_to_vector(module.parameters()).detach()
    vector_to_parameters(vector * 0.75, module.parameters())


def load(module: nn.Module) -> None:
    torch.manual_seed(7)
    module.load_state_dict(Stack().state_dict())


@torch.no_grad()
def average_slowly(module: nn.Module) -> None:
    torch.manual_seed(8)
    for param, other in zip(module.parameters(), Stack().parameters(), strict=True):
        param.lerp_(other, 0.25)


WRITES = (
    *(clamp, clamp_through_data, scale, scale_together, write_a_part, initialize, reset),
    *(assign_data, from_vector, load, average_slowly),
)


def test_writes_to_resting_weights_persist() -> None:
    def body(twins: Twins) -> None:
        for write in WRITES:
            twins.on_both(write)
            twins.assert_same(write.__name__)
            twins.train()
            twins.on_both(write)
            twins.train()
            twins.assert_same(f"{write.__name__} and a step")

    on_twins(body)


def test_writes_between_backward_and_step_persist() -> None:
    def body(twins: Twins) -> None:
        for write in WRITES:
            twins.zero_grad()
            twins.backward()
            twins.on_both(write)
            twins.step()
            twins.assert_same(write.__name__)

    on_twins(body)


def test_writes_of_an_early_rank_do_not_reach_a_late_one_twice() -> None:
    """New values may still be on their way from this rank to others when user code changes them."""

    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            for late in (0, 1):
                twins = Twins(rank, stage)
                for _ in range(2):
                    twins.zero_grad()
                    twins.backward()
                    dist.barrier()
                    twins.step()
                    if rank == late:
                        time.sleep(0.1)
                    twins.on_both(scale)
                    twins.assert_same(f"stage {stage}, rank {late} is late")
                twins.close()

    run_ranks(body, 2)


def test_an_early_rank_that_ends_leaves_a_late_one_its_values() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            for late in (0, 1):
                twins = Twins(rank, stage)
                twins.train(2)
                dist.barrier()
                if rank == late:
                    time.sleep(0.1)
                twins.engine.restore()
                twins.engine.close()
                twins.on_both(scale)
                ours, theirs = (dict(module.named_parameters()) for module in twins.both)
                assert_same_bits(ours, theirs, f"stage {stage}, rank {late} is late")

    run_ranks(body, 2)


def test_writes_inside_forward_persist() -> None:
    class Bounded(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.3, 0.3)
            self.bias.data.mul_(0.9)
            return super().forward(batch)

    def body(twins: Twins) -> None:
        twins.train(3)
        twins.assert_same()

    on_twins(body, build=lambda: nn.Sequential(*[Bounded(WIDTH, WIDTH) for _ in range(3)]))


def test_a_weight_changed_between_forward_and_backward_is_an_error() -> None:
    def in_place(module: nn.Module) -> None:
        with torch.no_grad():
            module[2].weight.add_(1)

    def by_loading(module: nn.Module) -> None:
        module.load_state_dict(Stack().state_dict())

    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            for change in (in_place, by_loading):
                twins = Twins(rank, stage)
                for module, loss in zip(twins.both, twins.losses(), strict=True):
                    change(module)
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()

    run_ranks(body, 2)


def test_a_step_between_forward_and_backward_is_an_error() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage)
            for loss in twins.losses():
                loss.backward(retain_graph=True)
            late = twins.losses()
            twins.step()
            for loss in late:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()

    run_ranks(body, 2)


def test_an_activation_changed_between_forward_and_backward_is_an_error() -> None:
    class Careless(nn.Sequential):
        def forward(self, batch: Tensor) -> Tensor:
            hidden = torch.exp(self[0](batch))  # whose result is saved
            result = self[1](hidden)  # whose input is saved
            hidden.add_(1)
            return result

    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage, lambda: Careless(*[nn.Linear(WIDTH, WIDTH)] * 2))
            for loss in twins.losses():
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()

    run_ranks(body, 2)


def test_writes_through_data_between_forward_and_backward_go_unnoticed_as_ever() -> None:
    def body(twins: Twins) -> None:
        losses = twins.losses()
        twins.on_both(clamp_through_data)
        for loss in losses:
            loss.backward()
        twins.assert_same()
        twins.step()
        twins.assert_same()

    on_twins(body)


# --- Autograd ---


def test_penalties_on_gradients_of_inputs_train_the_same() -> None:
    class Penalized(Stack):
        def forward(self, batch: Tensor) -> Tensor:
            batch = batch.requires_grad_()
            result = batch
            for layer in self:
                result = torch.tanh(layer(result))
            (slope,) = torch.autograd.grad(result.sum(), batch, create_graph=True)
            return result + slope.square()

    def body(twins: Twins) -> None:
        twins.train(3)
        twins.assert_same()

    on_twins(body, build=Penalized)


def test_backward_that_creates_a_graph_gives_the_same_gradients() -> None:
    def body(twins: Twins) -> None:
        for _ in range(2):
            for loss in twins.losses():
                loss.backward(create_graph=True)
            twins.average()
            twins.step()
            twins.assert_same()
            twins.zero_grad()

    on_twins(body, by_hand=True)


def test_accumulated_backward_passes_that_create_graphs_count_once_each() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            torch.manual_seed(0)
            module = nn.Linear(2, 1, bias=False)
            engine = ZeroEngine(module, stage=stage)
            for micro in range(2):
                with engine.no_sync() if micro == 0 else contextlib.nullcontext():
                    with engine.forward():
                        loss = module(torch.full((1, 2), float(rank + 1))).sum()
                    loss.backward(create_graph=True)
            # Each pass gives 1 on one rank and 2 on the other.
            assert module.weight.grad.tolist() == [[3.0, 3.0]], f"stage {stage}"

    run_ranks(body, 2)


def test_gradients_asked_for_by_name_are_local_and_full() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage)
            twins.train()
            batch = twins.batch()
            with twins.engine.forward():
                ours = twins.ours(batch).square().mean()
            theirs = twins.theirs(batch).square().mean()
            grads = [
                torch.autograd.grad(loss, list(module.parameters()))
                for loss, module in zip((ours, theirs), twins.both, strict=True)
            ]
            for mine, other in zip(*grads, strict=True):
                assert_same_bits({"": mine}, {"": other}, f"stage {stage}")

    run_ranks(body, 2)


class Checkpointed(nn.Sequential):
    """Layers that are computed again in backward, with dropout, and one that is not, if any.

    Args:
        reentrant: Which kind.
        plain: The number of the layer that is not computed again.
    """

    def __init__(self, reentrant: bool, plain: int | None) -> None:
        super().__init__(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.reentrant = reentrant
        self.plain = plain

    def forward(self, batch: Tensor) -> Tensor:
        torch.manual_seed(11)  # dropout alike in both twins
        batch = batch.requires_grad_()
        for number, layer in enumerate(self):
            if number == self.plain:
                batch = layer(batch)
            else:
                batch = checkpoint(
                    lambda x, layer=layer: F.dropout(torch.tanh(layer(x)), 0.2),
                    batch,
                    use_reentrant=self.reentrant,
                )
        return batch


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plain", [None, 0, 4])
def test_layers_that_are_computed_again_train_the_same(reentrant: bool, plain: int | None) -> None:
    def body(twins: Twins) -> None:
        twins.train(3)
        twins.assert_same()

    # DDP can either look for unused parameters or bear reentrant checkpoints.
    on_twins(body, build=lambda: Checkpointed(reentrant, plain), unused=False)


def test_a_group_of_layers_that_are_computed_again_trains_the_same() -> None:
    class Grouped(Stack):
        def forward(self, batch: Tensor) -> Tensor:
            for group in (list(self)[:2], list(self)[2:4]):
                batch = checkpoint(nn.Sequential(*group), batch, use_reentrant=False)
            return self[4](batch)

    def body(twins: Twins) -> None:
        twins.train(3)
        twins.assert_same()

    on_twins(body, build=Grouped)


# --- What trains may change on the way ---


def test_layers_may_be_frozen_and_thawed_between_steps() -> None:
    def body(twins: Twins) -> None:
        twins.train(2)
        for frozen in (True, False, True, False):
            twins.on_both(lambda module, frozen=frozen: module[2].requires_grad_(not frozen))
            twins.train(2)
            twins.assert_same(f"frozen: {frozen}")

    on_twins(body, by_hand=True)  # DDP refuses it


def test_a_new_param_group_and_a_new_optimizer_train_from_then_on() -> None:
    def body(rank: int, world_size: int) -> None:
        for stage in STAGES:
            twins = Twins(rank, stage)
            twins.optimizers = [
                torch.optim.SGD(module[:2].parameters(), lr=0.1) for module in twins.both
            ]
            twins.engine.attach(twins.optimizers[0])
            twins.train()
            twins.assert_same(f"stage {stage}, some layers")
            for optimizer, module in zip(twins.optimizers, twins.both, strict=True):
                optimizer.add_param_group({"params": list(module[2:].parameters()), "lr": 0.2})
            twins.train()
            twins.on_both(nn.Module.zero_grad)
            twins.assert_same(f"stage {stage}, all layers")
            twins.optimizers = [torch.optim.Adam(module.parameters()) for module in twins.both]
            twins.engine.attach(twins.optimizers[0])
            twins.train(2)
            twins.assert_same(f"stage {stage}, another optimizer")
            twins.close()

    run_ranks(body, 2)


def test_after_an_error_in_backward_training_goes_on() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: Tensor) -> Tensor:
            return batch.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("out of memory, say")

    def body(twins: Twins) -> None:
        twins.train(2)
        batch = twins.batch()
        with twins.engine.forward():
            hidden = twins.ours[2](Fails.apply(twins.ours[1](twins.ours[0](batch))))
            loss = twins.ours[4](twins.ours[3](hidden)).sum()
        with pytest.raises(ValueError, match="out of memory"):
            loss.backward()
        twins.train(3)
        twins.assert_same()

    on_twins(body)
