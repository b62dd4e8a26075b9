"""What autocast would cast to a half dtype: functions, and the parameters that only they read.

A parameter that is taken for one of those and reaches another function is read in fp32, so taking
too many or too few costs traffic. The functions have to be those that cast each parameter once.
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
_ATTENTION = frozenset(
    "in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight".split()
)
_BY_NAME = {"transformers.pytorch_utils.Conv1D"}


def _functions() -> frozenset[Callable[..., Any]]:
    names = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
    names += " lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
    products = "matmul mm bmm addmm baddbmm".split()
    found: set[Any] = {getattr(torch, name) for name in [*names.split(), *products]}
    found |= {getattr(Tensor, name) for name in [*products, "__matmul__", "__rmatmul__"]}
    return frozenset(found | {F.linear, F.multi_head_attention_forward})


_FUNCTIONS = _functions()
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def is_lowered(func: Callable[..., Any], device_type: str, dtype: torch.dtype) -> bool:
    """Say whether a function computes in a half dtype under autocast and casts parameters once."""
    return func in _FUNCTIONS or (func in _RECURRENT and _lowers(func, device_type, dtype))


def _lowers(func: Any, device_type: str, dtype: torch.dtype) -> bool:
    """Say so of a function over many time steps (torch 2.13).

    On CUDA autocast makes the weights fp16 whatever its dtype. On the CPU the LSTM casts once in
    bf16, and all others cast once per time step, which sums gradients in another dtype.
    """
    if device_type == "cuda":
        return dtype is torch.float16
    return func is torch.lstm and dtype is torch.bfloat16


_ATTENTION_ARGUMENTS = {5, 6, 11, 12}  # in_proj and out_proj, weight and bias


def lowered_arguments(func: Callable[..., Any], args: Any, kwargs: Any) -> Iterator[Any]:
    """List the arguments of a lowered function that it reads in the half dtype."""
    if func is F.multi_head_attention_forward:
        yield from (arg for i, arg in enumerate(args) if i in _ATTENTION_ARGUMENTS)
        yield from (kwargs.get(name) for name in (*_ATTENTION, "out_proj_weight", "out_proj_bias"))
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
    """Find all parameters that no compiled code and no renormalising table reads, by identity."""
    watched: set[int] = set()
    others: set[int] = set()
    for child, compiled in _with_compiled(module):
        renews = isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None
        own = {id(param) for param in child._parameters.values() if param is not None}
        (others if compiled or renews else watched).update(own)
    return watched - others


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
    for recurrent, func in ((nn.LSTM, torch.lstm), (nn.GRU, torch.gru), (nn.RNN, torch.rnn_tanh)):
        if isinstance(module, recurrent):
            fits = _lowers(func, device.type, dtype) and not module.proj_size
            return _ANY if fits and type(module).forward is recurrent.forward else None
    for cls in _LAYERS:
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
