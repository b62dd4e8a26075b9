"""Fine-tunes a Hugging Face model with LoRA adapters of peft.

Run from the root of the repository:

    python examples/lora/train.py --strategy zero3
"""

import argparse
import inspect
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import lightning_zero  # noqa: F401  # Registers the names of the strategies.

BYTES = 256


def make_base(seed: int) -> GPT2LMHeadModel:
    """Builds a small GPT-2 over bytes, with random weights: there is nothing to download.

    Args:
        seed: What the weights depend on.
    """
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=64,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    return GPT2LMHeadModel(config)


def read_windows(steps: int, batch_size: int, context: int, seed: int) -> TensorDataset:
    """Draws stretches of the source of Python's argparse: (steps * batch_size, context) bytes."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (steps * batch_size, 1), generator=generator)
    return TensorDataset(text[starts + torch.arange(context)])


class FineTuning(L.LightningModule):
    """Trains the adapters of a peft model, and nothing else of it."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        """Keeps the model.

        Args:
            model: A causal language model with adapters.
            learning_rate: Of AdamW.
        """
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW on what requires gradients: the adapters."""
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", default="zero3", help="ddp, zero1, zero2, zero3, or any Lightning knows")
    add("--accelerator", default="cpu", help="what to train on")
    add("--devices", type=int, default=2, help="number of ranks")
    add("--precision", default="32-true", help="Lightning's name for the number format")
    add("--steps", type=int, default=100, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="stretches of text in a rank's batch")
    add("--lora-rank", type=int, default=8, help="rank of the adapters")
    add("--lr", type=float, default=1e-2, help="learning rate")
    add("--seed", type=int, default=0, help="what the weights and the data depend on")
    add("--out", type=Path, default=Path("runs/lora"), help="folder for the adapter")
    return parser.parse_args()


def changed(now: dict[str, Tensor], before: dict[str, Tensor]) -> set[str]:
    """Names the tensors that differ."""
    return {name for name, value in now.items() if not torch.equal(value, before[name])}


def main() -> None:
    """Trains, saves the adapter, and loads it onto a fresh base."""
    began = time.perf_counter()
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    logging.set_verbosity_error()
    lora = LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=2 * arguments.lora_rank,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,  # GPT-2's layers hold their weights transposed.
        task_type="CAUSAL_LM",
    )
    model = FineTuning(get_peft_model(make_base(arguments.seed), lora), arguments.lr)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = L.Trainer(
        accelerator=arguments.accelerator,
        devices=arguments.devices,
        strategy=arguments.strategy,
        precision=arguments.precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    batch = arguments.batch_size * arguments.devices
    windows = read_windows(arguments.steps, batch, context=64, seed=arguments.seed)
    trainer.fit(model, DataLoader(windows, arguments.batch_size))

    # From here on the model is a whole one again, on the CPU, and no rank waits for another.
    if not trainer.is_global_zero:
        return
    moved = changed(model.state_dict(), before)
    model.model.save_pretrained(arguments.out)
    report(arguments, model, moved, time.perf_counter() - began)


def report(arguments: argparse.Namespace, model: Any, moved: set[str], seconds: float) -> None:
    """Prints what was trained, and checks the saved adapter on a base built anew."""
    reloaded = PeftModel.from_pretrained(make_base(arguments.seed), arguments.out).eval()
    tokens = read_windows(1, 8, context=64, seed=arguments.seed + 1).tensors[0]
    with torch.no_grad():
        same = torch.equal(reloaded(tokens).logits, model.model.eval()(tokens).logits)
    base = {name for name in moved if "lora_" not in name}
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    total = sum(param.numel() for param in model.parameters())
    size = (arguments.out / "adapter_model.safetensors").stat().st_size
    print(f"strategy        {arguments.strategy}, {arguments.devices} ranks")
    print(f"trained         {trained:,} of {total:,} parameters")
    print(f"base            {'CHANGED' if base else 'unchanged'}")
    print(f"loss            {model.losses[0]:.3f} at first, {model.losses[-1]:.3f} at last")
    print(f"adapter         {arguments.out}, {size / 1e3:.0f} kB")
    print(f"loaded again    {'the same outputs' if same else 'OTHER OUTPUTS'}")
    print(f"wall time       {seconds:.0f} s")


if __name__ == "__main__":
    main()
