"""What a forward and a backward pass hold beside the engine's buffers, found without computing.

The training step runs on fake tensors, which have shapes and storages of a size but no values.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Container, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.precision import ZeroPrecision


@dataclass(frozen=True)
class Activations:
    """Bytes at the worst moment of one micro-batch on one rank.

    Attributes:
        with_casts: What ``ddp`` holds, where autocast casts weights.
        without_casts: The same without casts of weights that are held in half precision anyway.
    """

    with_casts: int
    without_casts: int


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, as long as they live.

    Args:
        ignored: Storages that do not count, as of parameters.
        weights: Of them those of weights whose casts are counted apart.
    """

    def __init__(self, ignored: Container[int], weights: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.plain = self.peak = self.plain_peak = 0
        self._ignored = ignored
        self._weights = weights
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and (
            args[0].untyped_storage()._cdata in self._weights
        )
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf, is_cast)
        return result

    def _watch(self, tensor: Tensor, is_cast: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._ignored:
            return
        nbytes = storage.nbytes()
        plain = 0 if is_cast else nbytes

        # Torch keeps the Python object of a storage for as long as the storage itself.
        def gone(_: Any) -> None:
            del self._alive[key]
            self.total -= nbytes
            self.plain -= plain

        self._alive[key] = weakref.ref(storage, gone)
        self.total += nbytes
        self.plain += plain
        self.peak = max(self.peak, self.total)
        self.plain_peak = max(self.plain_peak, self.plain)


def count_activations(
    module: nn.Module, batch: Any, precision: ZeroPrecision, halves: Container[int]
) -> Activations:
    """Run a training step on fake tensors and count what it holds.

    Counted is what exists at once in forward and backward, without parameters, their gradients,
    the module's buffers and the batch. Kernels are chosen as for the CPU.

    Args:
        module: The module, on the meta device.
        batch: One micro-batch of one rank.
        precision: Whose autocast and conversion of inputs the step runs with.
        halves: Parameters that have half-precision working values, by identity.

    Raises:
        RuntimeError: If the step needs values or a running Trainer.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    trainer = module.__dict__.get("_trainer")
    with mode, warnings.catch_warnings(), _faked(module) as fakes:
        warnings.simplefilter("ignore")
        if isinstance(module, L.LightningModule):
            module._trainer = None  # so that `log` does nothing
        kept = [*fakes.values(), *module.buffers()]
        inputs = precision.convert_input(tree_map(_fake, batch))
        kept += [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        ignored = {tensor.untyped_storage()._cdata for tensor in kept}
        weights = {fakes[key].untyped_storage()._cdata for key in fakes if key in halves}
        for param in module.parameters():
            if param.requires_grad:
                register: Any = param.register_post_accumulate_grad_hook
                register(_drop_grad)
        counter = _Count(ignored, weights)
        try:
            with counter:
                _run(module, inputs, precision)
        except Exception as error:
            raise RuntimeError(
                f"The training step of {type(module).__name__} does not run without values and a "
                f"Trainer, on a batch of {_shapes(batch)}: {type(error).__name__}: {error}\n"
                "Give the batch as the step takes it. Leave out the batch if the step needs values "
                "or the Trainer: the plan is then complete but for activations."
            ) from error
        finally:
            if isinstance(module, L.LightningModule):
                module._trainer = trainer
    return Activations(counter.peak, counter.plain_peak)


def _shapes(batch: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    words = [
        f"{'x'.join(map(str, leaf.shape)) or 'scalar'}:{str(leaf.dtype).removeprefix('torch.')}"
        for leaf in tensors
    ]
    return ",".join(words) or "no tensors"


def _run(module: nn.Module, inputs: Any, precision: ZeroPrecision) -> None:
    module.train()
    with torch.enable_grad():
        with precision.forward_context():
            if isinstance(module, L.LightningModule):
                output = module.training_step(inputs, 0)
            else:
                output = module(inputs)
        if isinstance(output, dict):
            output = output.get("loss", output)
        losses = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if losses:
            losses[0].sum().backward()  # type: ignore[no-untyped-call]


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def _fake(value: Any) -> Any:
    """Make a tensor of the same shape that has no values."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(
        tuple(value.shape), value.stride(), dtype=value.dtype, device="cpu"
    ).requires_grad_(value.requires_grad)


@contextmanager
def _faked(module: nn.Module) -> Generator[dict[int, Tensor], None, None]:
    """Put fake parameters and buffers into a module for a while.

    Yields:
        The fake parameters, by the identity of those that they stand for.
    """
    fakes: dict[int, Any] = {}
    before = []
    for child in module.modules():
        before.append((child, dict(child._parameters), dict(child._buffers)))
        for name, param in child._parameters.items():
            if param is not None:
                if id(param) not in fakes:
                    fakes[id(param)] = nn.Parameter(_fake(param.detach()), param.requires_grad)
                child._parameters[name] = fakes[id(param)]
        for name, buffer in child._buffers.items():
            child._buffers[name] = _fake(buffer)
    try:
        yield fakes
    finally:
        for child, params, buffers in before:
            child._parameters.update(params)
            child._buffers.update(buffers)
