"""Time and weigh one training step of a small GPT under several strategies, side by side.

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
WARM_UP = 3  # optimizer steps that are neither timed nor weighed
MARK = "MEASURED "


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained.

    Attributes:
        strategy: One of ``STRATEGIES``, or any other name that Lightning knows.
        ranks: Processes, of one thread each.
        width: Features of a token.
        layers: Transformer blocks.
        tokens: Tokens of a batch, which is a single sequence.
        vocab: Different tokens.
        steps: Optimizer steps.
        precision: As for the Trainer.
        accumulate: Batches per optimizer step.
    """

    strategy: str
    ranks: int = 2
    width: int = 256
    layers: int = 16
    tokens: int = 128
    vocab: int = 2048
    steps: int = 15
    precision: str = "32-true"
    accumulate: int = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What rank 0 found.

    Attributes:
        step: Median seconds of an optimizer step.
        peak: Growth of the process at its largest, in bytes of the fp32 parameters.
        first: Training loss of the first batch.
        last: Training loss of the last batch.
    """

    step: float
    peak: float
    first: float
    last: float


def main() -> None:
    """Run what the command line asks for."""
    if len(sys.argv) == 3 and sys.argv[1] == "--rank-of":
        measure(Setup(**json.loads(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES), metavar="STRATEGY")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every strategy")
    parser.add_argument("--memory", action="store_true", help="weigh; the times then say little")
    for field in fields(Setup):
        if field.name != "strategy":
            kind = type(field.default)
            parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    options = vars(parser.parse_args())
    strategies, rounds, memory = (options.pop(key) for key in ("strategies", "rounds", "memory"))
    if options["steps"] <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that warm up")
    compare([Setup(strategy=name, **options) for name in strategies], rounds, memory)


def compare(setups: Sequence[Setup], rounds: int, memory: bool) -> None:
    """Run all setups in turn, several times, and print the table.

    Args:
        setups: The rows; the first is what the others are compared with.
        rounds: How often to go through them. Taking turns, they share the machine's moods.
        memory: Whether the allocator gives freed blocks back at once, which costs time.
    """
    found: dict[str, list[Measurement]] = {setup.strategy: [] for setup in setups}
    for _ in range(rounds):
        for setup in setups:
            found[setup.strategy].append(launch(setup, memory))
    base = median(each.step for each in found[setups[0].strategy])
    print(f"{'':8} {'step ms':>8} {'ratio':>6} {'peak P':>7}  first -> last loss")
    for name, runs in found.items():
        step, peak = median(run.step for run in runs), median(run.peak for run in runs)
        losses = f"{runs[0].first:.5f} -> {runs[0].last:.5f}"
        print(f"{name:8} {step * 1e3:8.0f} {step / base:6.2f} {peak:7.2f}  {losses}")


def launch(setup: Setup, memory: bool) -> Measurement:
    """Run one setup in fresh processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if memory:
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setup.ranks}"]
    command = [sys.executable, *torchrun, __file__, "--rank-of", json.dumps(asdict(setup))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return Measurement(**json.loads(line.removeprefix(MARK)))
    sys.exit(f"{setup.strategy} measured nothing:\n{done.stderr[-4000:]}")


class PeakMemory:
    """The growth of this process since it was made, at its largest since the last ``restart``.

    The kernel keeps the mark (Linux), so that no moment is missed; elsewhere it is not a number.
    """

    def __init__(self) -> None:
        self._base = self._read("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> float:
        """Return the growth."""
        return self._read("VmHWM") - self._base

    @staticmethod
    def _read(key: str) -> float:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith(f"{key}:"):
                    return float(line.split()[1]) * 1024
        return float("nan")


def measure(setup: Setup) -> None:
    """Be one rank: train, and on rank 0 print the measurement."""
    import lightning as L
    import torch
    from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
    from torch import Tensor, nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import lightning_zero  # noqa: F401 - it registers the names

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = setup.width
            self.attention_norm, self.attention = nn.LayerNorm(width), nn.Linear(width, 3 * width)
            self.output = nn.Linear(width, width)
            self.hidden_norm, self.hidden = nn.LayerNorm(width), nn.Linear(width, 4 * width)
            self.contract = nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.attention(self.attention_norm(x)).chunk(3, dim=-1)
            heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.output(mixed.transpose(1, 2).flatten(2))
            return x + self.contract(F.gelu(self.hidden(self.hidden_norm(x))))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(setup.vocab, setup.width)
            self.place = nn.Embedding(setup.tokens, setup.width)
            self.blocks = nn.ModuleList(Block() for _ in range(setup.layers))
            self.norm = nn.LayerNorm(setup.width)
            self.head = nn.Linear(setup.width, setup.vocab, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.token(tokens[:, :-1]) + self.place(torch.arange(setup.tokens))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()
            self.losses: list[float] = []
            self.times: list[float] = []

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.network(batch)
            self.losses.append(loss.item())
            return loss

        def configure_model(self) -> None:
            if setup.strategy == "fsdp2":  # which cannot do without help from the module
                mesh = self.device_mesh["data_parallel"]
                for module in (*self.network.blocks, self.network):
                    fully_shard(module, mesh=mesh)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
            step, micro = divmod(batch_idx, setup.accumulate)
            if step == WARM_UP and micro == 0:
                peak.restart()
            self.started = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter() - self.started)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    peak = PeakMemory()
    model = Model()
    nbytes = 4 * sum(param.numel() for param in model.parameters())
    strategy: str | Strategy = setup.strategy
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=setup.ranks, tensor_parallel_size=1)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=setup.ranks,
        precision=setup.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=setup.accumulate,
        max_steps=setup.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    count = setup.steps * setup.accumulate * setup.ranks
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(setup.vocab, (count, setup.tokens + 1), generator=generator)
    trainer.fit(model, DataLoader(data, batch_size=1))
    if trainer.global_rank == 0:
        times = [sum(group) for group in _grouped(model.times, setup.accumulate)]
        measurement = Measurement(
            step=median(times[WARM_UP:]),
            peak=peak.bytes() / nbytes,
            first=model.losses[0],
            last=model.losses[-1],
        )
        print(MARK + json.dumps(asdict(measurement)), flush=True)


def _grouped(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


if __name__ == "__main__":
    main()
