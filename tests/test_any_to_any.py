"""What one strategy saves at some number of ranks, every other loads at every other number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from loaders import StatefulLoader
from modules import CLASSES, FEATURES, Supervised, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.convert import convert
from ranks import run_ranks

DDP = "ddp"
KINDS = ("full", "sharded")
SOURCES = ((DDP, "full"), *((f"zero{stage}", kind) for stage in (1, 2, 3) for kind in KINDS))
TARGETS = (DDP, "zero1", "zero2", "zero3")
RANKS = (1, 2, 3, 4)
ROWS = 48  # the batch of all ranks together, which 1 to 4 divide
STEPS = 4  # two before the checkpoint and two after


class Everything(Supervised):
    """Tied, frozen and odd parameters, buffers of several dtypes, groups and schedulers."""

    def __init__(self, plain: bool = False, optimizer: str = "AdamW") -> None:
        super().__init__(optimizer=optimizer, groups=True, schedule=True)
        self.enter = nn.Linear(FEATURES, 13)
        self.norm = nn.BatchNorm1d(13)  # with fixed statistics, which do not depend on the ranks
        self.norm.running_mean.normal_()
        self.watch = nn.BatchNorm1d(FEATURES, affine=False)  # whose statistics change
        self.first = nn.Linear(13, 13)
        self.second = nn.Linear(13, 13, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(13, 7).requires_grad_(False)
        self.back = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.zeros(1))
        self.turned = nn.Parameter(torch.randn(13, CLASSES).t() / 4)
        if plain:  # FSDP2 takes neither scalars nor what is not contiguous
            self.scale = nn.Parameter(torch.full((1,), 1.5))
            self.turned = nn.Parameter(self.turned.detach().contiguous())
        self.register_buffer("count", torch.tensor(2**40 + 1))

    def forward(self, inputs: Tensor) -> Tensor:
        self.watch(inputs)
        hidden = F.gelu(self.norm.eval()(self.enter(inputs)))
        hidden = hidden + self.second(F.gelu(self.first(hidden))) * self.scale + self.shift
        return F.linear(hidden + self.back(self.frozen(hidden)), self.turned)

    def configure_optimizers(self) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        matrices = [param for param in trained if param.ndim > 1]
        rest = [param for param in trained if param.ndim <= 1]
        groups = [{"params": rest, "weight_decay": 0.0, "lr": 3e-3}, {"params": matrices}]
        optimizer = getattr(torch.optim, self.optimizer)(groups, lr=1e-2)
        each_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return [optimizer], [{"scheduler": each_step, "interval": "step"}]


@dataclass
class Ended:
    """What a rank can tell of a run.

    Attributes:
        losses: The training losses since the checkpoint.
        rates: The learning rates since then.
        weights: The module's state dict at the end.
        state: The optimizer's state at the end, of full shapes; on rank 0.
    """

    losses: list[float]
    rates: list[list[float]]
    weights: dict[str, Tensor]
    state: dict[str, Tensor] = field(default_factory=dict)


def make_strategy(name: str, kind: str = "full") -> str | Strategy:
    """Make a strategy in whose units most parameters lie across the ranks' borders."""
    if name == DDP:
        return DDP
    settings: dict[str, Any] = {"zero3": {"auto_wrap_policy": "layers"}}.get(name, {})
    return ZeroStrategy(stage=int(name[-1]), state_dict_type=kind, **settings)


def loader(rank: int, world_size: int) -> StatefulLoader:
    """Deal the same batches of rows to any number of ranks."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(ROWS * STEPS, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (ROWS * STEPS,), generator=generator)
    return StatefulLoader((inputs, targets), ROWS, rank, world_size)


def optimizer_state(trainer: Any) -> dict[str, Tensor]:
    """Collect the optimizer's state in full, whatever the strategy saves."""
    strategy = trainer.strategy
    if isinstance(strategy, ZeroStrategy):
        strategy._checkpoints.sharded = False
    found = strategy.optimizer_state(trainer.optimizers[0])["state"]
    if trainer.global_rank:
        return {}
    return {f"{number} {key}": v.clone() for number, s in found.items() for key, v in s.items()}


class Saves(Everything):
    """Saves after the second step, whose learning rates are not known before it."""

    path: Path | None = None

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.path is not None and self.trainer.global_step == STEPS // 2:
            self.trainer.save_checkpoint(self.path)


def train(
    rank: int,
    world_size: int,
    name: str,
    kind: str,
    path: Path,
    resumes: bool,
    precision: Any = "32-true",
    plain: bool = False,
    optimizer: str = "AdamW",
) -> Ended:
    """Run all steps and save in the middle, or run the rest of them from a checkpoint."""
    torch.manual_seed(2026 + resumes)
    model = Saves(plain, optimizer)
    model.path = None if resumes else path
    trainer = quiet_trainer(
        make_strategy(name, kind), world_size, max_steps=STEPS, precision=precision
    )
    trainer.fit(model, loader(rank, world_size), ckpt_path=path if resumes else None)
    steps = slice(-(STEPS // 2), None)
    state = optimizer_state(trainer)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return Ended(model.losses[steps], model.rates[steps], weights, state)


Saved = tuple[Path, list[Ended]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Saved]:
    """Save in the middle of an uninterrupted run, each only once; return where, and its end."""

    @functools.cache
    def run(name: str, kind: str, world_size: int, *settings: Any) -> Saved:
        path = tmp_path_factory.mktemp(f"{name}-{kind}-{world_size}") / "saved.ckpt"
        ends = run_ranks(train, world_size, name, kind, path, False, *settings, init=False)
        return path, ends

    return run


def assert_same_end(found: list[Ended], expected: list[Ended], exact: bool) -> None:
    """Assert that runs went on alike, bit for bit or within fp32 rounding."""
    tolerance = dict(rtol=0.0, atol=0.0) if exact else dict(rtol=2e-4, atol=2e-5)
    assert [end.rates for end in found] == [expected[0].rates] * len(found)
    for ours, theirs in zip(found, expected, strict=False):
        assert ours.weights.keys() == theirs.weights.keys()
        for name, value in theirs.weights.items():
            if exact or not name.startswith("watch.running"):  # those of a rank's own batches
                torch.testing.assert_close(ours.weights[name], value, **tolerance, msg=name)
    assert found[0].state.keys() == expected[0].state.keys()
    for name, value in expected[0].state.items():
        torch.testing.assert_close(found[0].state[name], value, **tolerance, msg=name)
    if exact:
        assert [end.losses for end in found] == [end.losses for end in expected]
    else:  # of equal parts of one batch
        means = [torch.tensor([e.losses for e in ends]).mean(0) for ends in (found, expected)]
        torch.testing.assert_close(*means, rtol=1e-4, atol=1e-5)


def as_file(path: Path) -> Path:
    """Return a checkpoint that ddp can open: a folder is converted."""
    if path.is_file():
        return path
    file = path.with_name("converted.ckpt")
    if not file.exists():
        convert(path, file)
    return file


def covering() -> list[tuple[str, str, int, str, int]]:
    """Pair every source with every target at the same ranks, and all counts of ranks with all.

    At the same number, sources take turns at 1 to 4 ranks. At others, every source meets every
    target, and every target comes at every number.
    """
    cases = []
    for one, (name, kind) in enumerate(SOURCES):
        for two, target in enumerate(TARGETS):
            world_size = RANKS[(one + two) % 4]
            cases.append((name, kind, world_size, target, world_size))
    for before in RANKS:
        for turn, (name, kind) in enumerate(SOURCES):
            after = RANKS[(before + turn % 3) % 4]
            cases.append((name, kind, before, TARGETS[(2 * turn + before) % 4], after))
    return cases


def test_the_cases_cover_every_source_and_target_and_every_pair_of_numbers_of_ranks() -> None:
    cases = covering()
    assert {(c[0], c[1], c[3]) for c in cases if c[2] == c[4]} == {
        (*source, target) for source in SOURCES for target in TARGETS
    }
    assert {(c[2], c[4]) for c in cases if c[2] != c[4]} == {
        (a, b) for a in RANKS for b in RANKS if a != b
    }
    others = [c for c in cases if c[2] != c[4]]
    assert {(c[3], c[4]) for c in others} == {(t, n) for t in TARGETS for n in RANKS}
    assert {(c[0], c[1], c[3]) for c in others} == {(*s, t) for s in SOURCES for t in TARGETS}


@pytest.mark.parametrize("case", covering(), ids=lambda case: "-".join(map(str, case)))
def test_a_run_goes_on_from_any_checkpoint_under_any_strategy(
    case: tuple[str, str, int, str, int], saved: Callable[..., Saved]
) -> None:
    name, kind, before, target, after = case
    path, expected = saved(name, kind, before)
    assert path.is_dir() == (kind == "sharded")
    if target == DDP:
        path = as_file(path)
    found = run_ranks(train, after, target, "full", path, True, init=False)
    # From three ranks on, ddp sums gradients in an order of its own.
    orders = before > 2 and (name == DDP) != (target == DDP)
    assert_same_end(found, expected, exact=before == after and not orders)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("zero1", "zero3"), ("zero3", "zero2"), ("zero2", DDP)])
def test_a_run_in_mixed_precision_goes_on_bit_for_bit(
    names: tuple[str, str], kind: str, saved: Callable[..., Saved]
) -> None:
    path, expected = saved(names[0], kind, 2, "bf16-mixed")
    if names[1] == DDP:
        path = as_file(path)
    found = run_ranks(train, 2, names[1], "full", path, True, "bf16-mixed", init=False)
    assert_same_end(found, expected, exact=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "before", "target", "after"),
    [("zero1", 2, "zero3", 2), ("zero3", 3, "zero2", 2), ("zero2", 2, "zero1", 3)],
)
@pytest.mark.parametrize("optimizer", ["Adafactor", "Rprop"])
def test_state_of_other_shapes_and_owners_goes_anywhere(
    optimizer: str,
    name: str,
    before: int,
    target: str,
    after: int,
    kind: str,
    saved: Callable[..., Saved],
) -> None:
    settings = ("32-true", False, optimizer)
    path, expected = saved(name, kind, before, *settings)
    found = run_ranks(train, after, target, "full", path, True, *settings, init=False)
    assert_same_end(found, expected, exact=before == after)


class Fsdp2(Saves):
    """The model under Lightning's own strategy for FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "sharded"):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.enter, self.back):
                fully_shard(layer, mesh=mesh)
            fully_shard(self, mesh=mesh)
            self.sharded = True


def train_fsdp2(rank: int, world_size: int, path: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Run all steps and save in the middle."""
    model = Fsdp2(plain=True)
    model.path = path
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    trainer = quiet_trainer(strategy, world_size, max_steps=STEPS)
    trainer.fit(model, loader(rank, world_size))
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    return model.losses[-(STEPS // 2) :], weights


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A sharded checkpoint of ModelParallelStrategy at two ranks, and how that run ended."""
    path = tmp_path_factory.mktemp("fsdp2") / "saved.ckpt"
    ends = run_ranks(train_fsdp2, 2, path, init=False)
    assert path.is_dir()
    return path, ends


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", TARGETS[1:])
def test_a_run_goes_on_from_a_sharded_checkpoint_of_fsdp2(
    name: str, world_size: int, fsdp2: tuple[Path, list[Any]]
) -> None:
    path, expected = fsdp2
    found = run_ranks(train, world_size, name, "full", path, True, plain=True, init=False)
    weights = expected[0][1]
    assert found[0].weights.keys() == weights.keys()
    for key, value in weights.items():
        if not key.startswith("watch.running"):
            torch.testing.assert_close(found[0].weights[key], value, rtol=2e-4, atol=2e-5, msg=key)
    means = torch.tensor([end.losses for end in found]).mean(0)
    torch.testing.assert_close(
        means, torch.tensor([losses for losses, _ in expected]).mean(0), rtol=1e-4, atol=1e-5
    )
