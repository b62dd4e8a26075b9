"""Parameters and gradients that are read and written anywhere."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from harness import WIDTH, Case, case
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn


@case
class PenaltyOverAllParameters(Case):
    def loss(self, batch: Tensor) -> Tensor:
        penalty = sum(p.abs().sum() for p in self.parameters())
        return super().loss(batch) + 1e-3 * penalty


@case
class TiedEmbedding(Case):
    def build(self) -> None:
        self.emb = nn.Embedding(17, 8)
        self.mid = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def loss(self, batch: Tensor) -> Tensor:
        ids = (batch.abs() * 5).long().clamp(max=16)
        h = self.mid(self.emb(ids))
        return F.cross_entropy(F.linear(h, self.emb.weight).flatten(0, 1), ids.flatten())


@case
class TiedLayers(Case):
    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.third = self.first

    def loss(self, batch: Tensor) -> Tensor:
        return self.third(self.second(self.first(batch)).tanh()).square().mean()


@case
class Recurrent(Case):
    def build(self) -> None:
        self.lstm = nn.LSTM(4, 8, 2, batch_first=True)
        self.gru = nn.GRU(8, 4, batch_first=True, bidirectional=True)

    def loss(self, batch: Tensor) -> Tensor:
        h, _ = self.lstm(batch.view(len(batch), 3, 4))
        h, _ = self.gru(h)
        return h.square().mean()


@case
class Attention(Case):
    def build(self) -> None:
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.own = nn.Parameter(torch.ones(4))

    def loss(self, batch: Tensor) -> Tensor:
        h = batch.view(len(batch), 3, 4)
        h = self.attention(h, h, h)[0] * self.own
        return self.layer(h).square().mean()


@case
class Normed(Case):
    def build(self) -> None:
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 16))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
        self.c = nn.utils.weight_norm(nn.Linear(16, 16))
        self.d = nn.utils.spectral_norm(nn.Linear(16, 4))

    def loss(self, batch: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(batch)).relu())).square().mean()


@case
class ParameterContainers(Case):
    def build(self) -> None:
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, 5)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(5)), "b": torch.randn(())})

    def loss(self, batch: Tensor) -> Tensor:
        h = sum(batch @ p for p in self.listed)
        return (h * self.named["a"] + self.named["b"]).square().mean()


@case
class ClampedWeights(Case):
    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.net.parameters():
            p.data.clamp_(-0.1, 0.1)


@case
class ClampedWeightsWithoutGrad(Case):
    def on_train_batch_start(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p.clamp_(-0.1, 0.1).mul_(0.9)


@case
class Reinitialised(Case):
    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.manual_seed(7)
            nn.init.xavier_normal_(self.net[0].weight)
            self.net[3].reset_parameters()


@case
class LoadedInAHook(Case):
    def on_train_start(self) -> None:
        torch.manual_seed(9)
        other = type(self)()
        self.load_state_dict(other.state_dict())

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == 0:
            self.kept = copy.deepcopy(self.state_dict())
        if batch_idx == 2:
            self.load_state_dict(self.kept)


@case
class CopiedAndMeasured(Case):
    def on_after_backward(self) -> None:
        self.seen += [p.grad.norm().item() for p in self.parameters() if p.grad is not None]
        self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]
        self.seen.append(torch.histc(self.net[0].weight.grad).clone())

    def on_train_batch_end(self, *args: Any) -> None:
        copied = copy.deepcopy(self.net)
        self.seen += [p.detach().clone() for p in copied.parameters()]
        self.seen += [p.norm().item() for p in self.net.parameters()]
        self.seen.append(torch.histc(self.net[0].weight.detach()))
        self.seen += [v.clone() for v in self.net.state_dict().values()]


@case
class TorchClipNorm(Case):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05).clone())


@case
class TorchClipValue(Case):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


@case
class LightningGradNorm(Case):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += sorted(float(v) for v in grad_norm(self.net, 2).values())


@case
class EditedGradients(Case):
    def on_after_backward(self) -> None:
        for p in self.net.parameters():
            p.grad.mul_(2)
            p.grad.data.add_(1e-3)
        self.net[0].weight.grad = self.net[0].weight.grad * 0.5
        self.net[3].bias.grad = None


@case
class Hooks(Case):
    def build(self) -> None:
        super().build()
        self.net[0].weight.register_hook(lambda g: g * 2)
        self.net[3].bias.register_hook(lambda g: g + 1)
        self.net[0].register_forward_hook(lambda m, a, out: out * 1.5)
        self.net[3].register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
        self.net[3].register_full_backward_hook(lambda m, gi, go: tuple(g * 3 for g in gi))
        self.net[1].register_full_backward_pre_hook(lambda m, go: tuple(g * 2 for g in go))


@case
class PlainMethods(Case):
    """Methods other than forward, a submodule's forward called directly."""

    def encode(self, batch: Tensor) -> Tensor:
        return F.linear(batch, self.net[0].weight, self.net[0].bias)

    def loss(self, batch: Tensor) -> Tensor:
        h = self.net[1].forward(self.encode(batch)).relu()
        return self.net[3].forward(h).square().mean()
