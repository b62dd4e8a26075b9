"""Records the timelines that the documentation shows: 16 transformer blocks on 4 CPU ranks.

    python docs/timelines.py          # all stages, a few minutes
    python docs/timelines.py 3        # one of them

Written are img/timeline-zero1.png and so on, and img/timeline-zero3.html. Of several recorded steps
the fastest is kept, since four ranks may share fewer cores with whatever else runs there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy, ZeroTimeline

RANKS, BLOCKS, WIDTH, TOKENS, VOCAB = 4, 16, 256, 128, 2048
STEPS = range(3, 11)
IMAGES = Path(__file__).parent / "img"


class Block(nn.Module):
    """Attention and an MLP, each after a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Model(L.LightningModule):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.tokens(batch[:, :-1]) + self.places(torch.arange(TOKENS))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def record(stage: int) -> None:
    """Train a few steps at one stage and keep what was drawn."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=RANKS,
            # Buckets as large as a block, so that the stages can be compared.
            strategy=ZeroStrategy(stage=stage, bucket_mb=3, start_method="fork"),
            callbacks=[ZeroTimeline(step=step, dirpath=folder) for step in STEPS],
            max_steps=STEPS.stop + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.randint(VOCAB, ((STEPS.stop + 1) * RANKS * 2, TOKENS + 1))
        trainer.fit(Model(), DataLoader(data, batch_size=2))
        if trainer.global_rank == 0:
            keep(stage, min(Path(folder).glob("*.json"), key=duration))
        trainer.strategy.barrier()


def duration(trace: Path) -> float:
    """Return when the last event of a Chrome trace ends, in microseconds."""
    events = json.loads(trace.read_text())["traceEvents"]
    return max(event.get("ts", 0.0) + event.get("dur", 0.0) for event in events)


def keep(stage: int, trace: Path) -> None:
    """Copy what was drawn of the step of a trace."""
    IMAGES.mkdir(exist_ok=True)
    for suffix in (".png", ".html") if stage == 3 else (".png",):
        written = trace.with_suffix(suffix)
        (IMAGES / f"timeline-zero{stage}{suffix}").write_bytes(written.read_bytes())


if __name__ == "__main__":
    for word in sys.argv[1:] or ("1", "2", "3"):
        record(int(word))
