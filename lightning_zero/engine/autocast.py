"""What autocast would cast to a half dtype: functions, and the parameters that only they read.

A parameter on the list that reaches a function off the list is read in fp32, so a list that is too
short or too long costs traffic and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ANY = frozenset[str]()

_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
)
# On CPU they cast once per time step (torch 2.13), so gradients would be summed in another dtype.
_ON_CUDA: tuple[type[nn.Module], ...] = (nn.GRU, nn.RNN)
_ATTENTION = frozenset(
    "in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight".split()
)
_BY_NAME = {"transformers.pytorch_utils.Conv1D"}


def _functions() -> frozenset[Callable[..., Any]]:
    names = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    names += " lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
    products = "matmul mm bmm addmm baddbmm".split()
    found: set[Any] = {getattr(torch, name) for name in [*names.split(), *products]}
    found |= {getattr(Tensor, name) for name in [*products, "__matmul__", "__rmatmul__"]}
    return frozenset(found | {F.linear, F.multi_head_attention_forward})


FUNCTIONS = _functions()
"""Functions that compute in a half dtype under autocast and read each parameter once."""

_ATTENTION_ARGUMENTS = {5, 6, 11, 12}  # in_proj and out_proj, weight and bias


def lowered_arguments(func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """List the arguments of one of ``FUNCTIONS`` that it reads in the half dtype."""
    if func is F.multi_head_attention_forward:
        yield from (arg for i, arg in enumerate(args) if i in _ATTENTION_ARGUMENTS)
        yield from (kwargs.get(name) for name in _ATTENTION)
        return
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, (list, tuple)):
            yield from argument
        else:
            yield argument


def lowered_parameters(module: nn.Module, device: torch.device, dtype: torch.dtype) -> set[int]:
    """Find the fp32 parameters that are read by nothing but lowered functions, by identity.

    Args:
        module: The whole module.
        device: Where it runs.
        dtype: The half dtype.
    """
    lowered: set[int] = set()
    others: set[int] = set()
    for child, compiled in _with_compiled(module):
        names = None if compiled else _lowered_names(child, device, dtype)
        for name, param in child._parameters.items():
            if param is not None:
                fits = names is not None and (not names or name in names)
                (lowered if fits else others).add(id(param))
    return lowered - others


def watched_parameters(module: nn.Module) -> set[int]:
    """Find all parameters outside of compiled code, by identity."""
    return {
        id(param)
        for child, compiled in _with_compiled(module)
        if not compiled
        for param in child._parameters.values()
        if param is not None
    }


def _with_compiled(module: nn.Module, compiled: bool = False) -> Iterator[tuple[nn.Module, bool]]:
    """List all modules, each with whether it runs inside compiled code, which no face can watch."""
    compiled |= isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod")
    compiled |= getattr(module, "_compiled_call_impl", None) is not None
    yield module, compiled
    for child in module.children():
        yield from _with_compiled(child, compiled)


def _lowered_names(
    module: nn.Module, device: torch.device, dtype: torch.dtype
) -> frozenset[str] | None:
    """Name the parameters of one module that it uses lowered; none named means all."""
    if isinstance(module, nn.MultiheadAttention):
        return _ATTENTION if type(module).forward is nn.MultiheadAttention.forward else None
    if isinstance(module, nn.LSTM):
        fits = device.type == "cuda" or (dtype is torch.bfloat16 and not module.proj_size)
        return _ANY if fits and type(module).forward is nn.LSTM.forward else None
    for cls in _LAYERS + (_ON_CUDA if device.type == "cuda" else ()):
        if isinstance(module, cls):
            return _ANY if _runs_as(type(module), cls) else None
    path = f"{type(module).__module__}.{type(module).__qualname__}"
    return _ANY if path in _BY_NAME else None


def _runs_as(cls: type[nn.Module], parent: type[nn.Module]) -> bool:
    """Say whether a subclass uses its parameters as its parent does."""
    if cls.forward is not parent.forward:
        return False
    inner = "_conv_forward"
    return getattr(cls, inner, None) is getattr(parent, inner, None)
