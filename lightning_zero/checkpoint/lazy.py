"""Tensors that are still in a file, and read by whatever uses them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_zero.checkpoint.entries import TensorEntry

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)  # nobody writes to it


class LazyTensor(Tensor):
    """A tensor of a checkpoint. Asking for its shape and dtype reads nothing; a slice reads itself.

    Anything else reads it and keeps the values, so that what is written to it stays.

    Attributes:
        entry: Where it is.
        skips: Whether copying from it does nothing, since another rank's values will come instead.
    """

    entry: TensorEntry
    skips: bool
    _range: tuple[int, int] | None
    _kept: Tensor | None

    @staticmethod
    def __new__(cls, entry: TensorEntry, numels: tuple[int, int] | None = None) -> LazyTensor:
        shape = entry.shape if numels is None else (numels[1] - numels[0],)
        self: LazyTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=entry.dtype)
        self.entry = entry
        self.skips = False
        self._range = numels
        self._kept = None
        return self

    def __init__(self, entry: TensorEntry, numels: tuple[int, int] | None = None) -> None:
        super().__init__()

    def read(self) -> Tensor:
        """Read the values, or return those that were kept."""
        if self._kept is not None:
            return self._kept
        if self._range is None:
            return self.entry.read()
        return self.entry.read_range(*self._range)

    def keep(self) -> Tensor:
        """Read the values, and stand for them from now on."""
        self._kept = self.read()
        return self._kept

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.keep().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        return self.keep().tolist()

    # What asks for the memory, past the dispatcher, gets that of the values.

    def data_ptr(self) -> int:
        return self.keep().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.keep().untyped_storage()

    def storage(self) -> Any:
        return self.keep().storage()  # type: ignore[no-untyped-call]

    def share_memory_(self) -> LazyTensor:
        self.keep().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.keep().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = memo.setdefault(id(self), self.read().clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.keep().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({self.entry.where}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default and isinstance(args[1], LazyTensor):
            return args[0] if args[1].skips else args[0].copy_(args[1].read())
        part = _part(func, args)
        if part is not None:
            return part
        if func in _COPIES:
            return func(*tree_map(_read, args), **kwargs)
        return func(*tree_map(_kept, args), **tree_map(_kept, kwargs))


def _part(func: Any, args: Any) -> LazyTensor | None:
    """Take a flat view, or a slice of one, without reading."""
    lazy = args[0]
    if not isinstance(lazy, LazyTensor) or lazy._kept is not None:
        return None
    flat = func is torch.ops.aten.as_strided.default and lazy._range is None
    if flat and tuple(map(tuple, args[1:3])) == ((lazy.numel(),), (1,)) and not any(args[3:]):
        return LazyTensor(lazy.entry, (0, lazy.numel()))
    if func is torch.ops.aten.slice.Tensor and lazy._range is not None:
        begin, end, step = slice(*args[2:5]).indices(lazy.numel())
        if step == 1:
            first = lazy._range[0]
            return LazyTensor(lazy.entry, (first + begin, first + max(begin, end)))
    return None


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, LazyTensor) else value


def _kept(value: Any) -> Any:
    return value.keep() if isinstance(value, LazyTensor) else value


def read_left(module: nn.Module) -> None:
    """Replace what a module has taken out of a checkpoint as it was, as metrics do.

    Raises:
        ValueError: If it was taken in a way that leaves no trace of where the values are.
    """
    made: dict[int, nn.Parameter] = {}  # tied ones stay one
    for child in module.modules():
        for name, param in child._parameters.items():
            if isinstance(param, LazyTensor):
                if id(param) not in made:
                    made[id(param)] = nn.Parameter(param.read().clone(), param.requires_grad)
                child._parameters[name] = made[id(param)]
        for values in (child.__dict__, child._buffers):
            for name, value in values.items():
                if isinstance(value, LazyTensor):
                    values[name] = value.read().clone()
                elif type(value) is list:
                    value[:] = [v.read().clone() if isinstance(v, LazyTensor) else v for v in value]
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if _is_hollow(tensor):
            raise ValueError(
                f"'{name}' was given values of the checkpoint as {name}.data = ..., and they are "
                f"still in the file: write {name}.data.copy_(...) or {name} = nn.Parameter(...)"
            )


def _is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor was made to share the memory of a :class:`LazyTensor`, which has none."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu":
        return False
    return tensor.layout == torch.strided and tensor.numel() > 0 and tensor.data_ptr() == 0
