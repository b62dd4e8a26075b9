"""A small GPT, and how Lightning trains it."""

import math

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

HEAD_WIDTH = 32


class Block(nn.Module):
    """One layer of the transformer: causal attention, then a two-layer perceptron."""

    def __init__(self, width: int) -> None:
        """Builds the layer.

        Args:
            width: The size of a character's representation, a multiple of 32.
        """
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        heads = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, vocabulary: int, width: int, layers: int, context: int) -> None:
        """Builds the model.

        Args:
            vocabulary: The number of different characters.
            width: The size of a character's representation, a multiple of 32.
            layers: The number of blocks.
            context: The most characters the model looks back on.
        """
        super().__init__()
        if width % HEAD_WIDTH:
            raise ValueError(f"width has to be a multiple of {HEAD_WIDTH}, got {width}")
        self.context = context
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialize)
        for name, parameter in self.named_parameters():
            if name.endswith("_out.weight"):  # These add up along the residual stream.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (batch, time) characters to (batch, time, vocabulary) logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float, seed: int) -> Tensor:
        """Continues a text, one drawn character at a time.

        Args:
            prompt: The encoded text to go on from.
            length: The number of characters to add.
            temperature: Below 1 for likelier characters, above 1 for more variety.
            seed: What the draws depend on.

        Returns:
            The prompt and what follows it.
        """
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[None, -self.context :])[0, -1].float()
            drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, drawn])
        return tokens


class LanguageModel(L.LightningModule):
    """Trains a GPT to predict the next character."""

    def __init__(
        self, vocabulary: int, width: int, layers: int, context: int, learning_rate: float
    ) -> None:
        """Builds the model.

        Args:
            vocabulary: The number of different characters.
            width: The size of a character's representation, a multiple of 32.
            layers: The number of blocks.
            context: The most characters the model looks back on.
            learning_rate: The highest learning rate of the schedule.
        """
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.gpt = GPT(vocabulary, width, layers, context)

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.gpt(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of one batch."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs the loss over the validation windows of all ranks."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Returns AdamW, its learning rate warmed up and then let down along a cosine."""
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, steps // 20)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = (step - warmup) / max(1, steps - warmup)
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))

        optimizer = AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.98))
        scheduler = LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
