"""The faces of a parameter: what a user's ``nn.Parameter`` object is at a given moment.

The module and the optimizer keep the user's own objects for the whole run; only ``__class__`` and
``data`` change.

- *working* (``ZeroParameter``): full shape, values present. Ops cost nothing extra.
- *resting* (``RestingParameter``): full shape and dtype, values absent (storage freed) or stale (a
  gather is under way). Questions about shape, dtype and the like are answered at once; any other
  op gathers first and then runs.
- *shard* (``nn.Parameter`` again): this rank's 1-D slice of the master, during optimizer steps.
- *borrowed* (``nn.Parameter`` again): the whole master, during steps of an optimizer that needs
  whole parameters, on the rank that owns this one; on others ``OwnedElsewhere``, without gradient.

A gradient has the first two: ``p.grad`` reads as a tensor of full shape whose values (the average
over the ranks) are gathered when something looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_zero.engine.autocast import lowered_arguments

if TYPE_CHECKING:
    from lightning_zero.engine.slot import ParameterSlot

_METADATA_PROPERTIES = (
    "_backward_hooks _base _grad _post_accumulate_grad_hooks _version device dtype grad grad_dtype "
    "grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse "
    "is_sparse_csr is_xpu itemsize layout name names nbytes ndim output_nr requires_grad "
    "retains_grad shape"
).split()
_METADATA_METHODS = (
    "__hash__ __len__ dim dim_order element_size get_device has_names is_coalesced is_complex "
    "is_conj is_contiguous is_floating_point is_inference is_neg is_same_size is_signed ndimension "
    "nelement new_empty new_empty_strided new_full new_ones new_zeros numel register_hook "
    "register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset stride"
).split()
_METADATA_FUNCTIONS = (
    "_has_compatible_shallow_copy_type empty_like full_like is_complex is_floating_point "
    "is_same_size is_tensor numel ones_like rand_like randn_like result_type zeros_like"
).split()


_GRAD: Any = Tensor.grad  # the accessors below the faces
_DATA: Any = Tensor.data


def _metadata() -> frozenset[Callable[..., Any]]:
    """List what never looks at a tensor's values, as ``__torch_function__`` sees it."""
    found: set[Any] = {_DATA.__set__, torch.autograd.grad, torch.autograd.backward}
    for name in _METADATA_PROPERTIES:
        attribute = getattr(Tensor, name, None)  # some exist in some versions only
        found |= {getattr(attribute, accessor, None) for accessor in ("__get__", "__set__")}
    found |= {getattr(Tensor, name, None) for name in _METADATA_METHODS}
    found |= {getattr(torch, name, None) for name in _METADATA_FUNCTIONS}
    return frozenset(found - {None})


def local_grad(param: nn.Parameter) -> Tensor | None:
    """Read the gradient that autograd itself has put on a parameter, whatever its face."""
    grad: Tensor | None = _GRAD.__get__(param)
    return grad


def set_local_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Set the gradient that autograd itself will see and add to."""
    _GRAD.__set__(param, grad)


def set_data(param: nn.Parameter, data: Tensor) -> None:
    """Make a parameter show ``data``. Its version counter does not move."""
    _DATA.__set__(param, data)


class ZeroParameter(nn.Parameter):
    """The working face.

    Attributes:
        zero_slot: What the engine knows of this parameter.
    """

    zero_slot: ParameterSlot

    @property
    def grad(self) -> Tensor | None:
        grad = local_grad(self)
        return self.zero_slot.read_grad() if grad is None else grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        self.zero_slot.write_grad(grad)

    @grad.deleter
    def grad(self) -> None:
        self.zero_slot.write_grad(None)

    @property
    def data(self) -> Tensor:
        # Writes through `.data` leave no trace on the version counter, so the unit assumes one.
        data: Tensor = _DATA.__get__(self)
        self.zero_slot.unit.touched = True
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        if data is self:  # `module.to(...)` where nothing changes
            return
        if data.shape != self.shape or data.dtype != self.dtype:
            raise RuntimeError(
                f"{self.zero_slot.name}.data cannot change its shape or dtype during training "
                f"({tuple(self.shape)}, {self.dtype} to {tuple(data.shape)}, {data.dtype}): its "
                "place in the sharded buffers is fixed. Change it before the Trainer starts."
            )
        with torch.no_grad():
            self.copy_(data)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copy = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(copy, self.requires_grad)
        result: nn.Parameter = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach().clone(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _leaves(arguments: Iterable[Any]) -> Iterable[Any]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            yield from _leaves(argument)
        elif isinstance(argument, dict):
            yield from _leaves(argument.values())
        else:
            yield argument


def _lower(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Put half-precision working values in place of the parameters that a function reads in those.

    Returns:
        The arguments, or None if it reads no such values.
    """
    if kwargs.get("out") is not None or _renormalises(func, args, kwargs):
        return None
    candidates = lowered_arguments(func, args, kwargs)
    slots = {id(leaf): leaf.zero_slot for leaf in candidates if isinstance(leaf, ZeroParameter)}
    halves = {key: slot.half_for(func) for key, slot in slots.items()}
    used = dict.fromkeys(half for half in halves.values() if half is not None)
    if not used:
        return None
    for half in used:
        half.unit.keep_writes()  # of code before, to fp32 values that are still there
        half.use(*used)
    values = {key: half.of(slots[key], func) for key, half in halves.items() if half is not None}

    return (
        tuple(_replace(argument, values) for argument in args),
        {key: _replace(argument, values) for key, argument in kwargs.items()},
    )


def _renormalises(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Say whether an embedding is to write to its table."""
    return func is F.embedding and (*args[3:4], kwargs.get("max_norm"))[0] is not None


# Not a function inside `_lower`: as it calls itself, it would be a cycle that holds the values.
def _replace(argument: Any, values: dict[int, Tensor]) -> Any:
    if type(argument) in (list, tuple):
        return type(argument)(_replace(item, values) for item in argument)
    return values.get(id(argument), argument)


def _awaken(func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run ``func`` after giving values to every resting tensor among its arguments."""
    kwargs = kwargs or {}
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    lowered = _lower(func, args, kwargs)
    if lowered is not None:
        args, kwargs = lowered
    leaves = list(_leaves((args, kwargs)))
    units = dict.fromkeys(p.zero_slot.unit for p in leaves if isinstance(p, ZeroParameter))
    grads = [leaf for leaf in leaves if isinstance(leaf, RestingGrad)]
    for unit in units:
        unit.use(*units)  # gathering one must not release another
    for grad in grads:
        grad.zero_slot.fill_grad(grad)
    if not units and not grads and lowered is None:
        raise RuntimeError(
            f"A sharded parameter reached {getattr(func, '__name__', func)} inside an object that "
            "cannot be searched. Pass the parameter itself, or a list, tuple or dict of them."
        )
    if any(type(leaf) is RestingParameter for leaf in leaves):  # present, but watched
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    result = func(*args, **kwargs)
    # The one function that is given half-precision values to look up, since its table is large.
    return result.float() if lowered is not None and func is F.embedding else result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _awaken_eagerly(func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> Any:
    """Run ``func`` between two graphs: what gathers must not become part of one."""
    return _awaken(func, args, kwargs)


class RestingParameter(ZeroParameter):
    """The resting face."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        awaken = _awaken_eagerly if torch.compiler.is_compiling() else _awaken
        return awaken(func, args, kwargs)


class OwnedElsewhere(ZeroParameter):
    """The face, during a step, of a parameter that another rank owns: it looks unused."""

    @property
    def grad(self) -> Tensor | None:
        return None

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None:
            self._refuse("The gradient", "set")

    @grad.deleter
    def grad(self) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        for leaf in _leaves((args, kwargs or {})):
            if isinstance(leaf, OwnedElsewhere):
                leaf._refuse("The value", "used")
        raise RuntimeError("The values of a parameter were used without a gradient of it.")

    def _refuse(self, what: str, done: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of {self.zero_slot.name} was {done} in an optimizer step on a rank that does "
            "not own it, where it has no gradient. An optimizer that looks at parameters without "
            "gradient, or that spreads its work over the ranks by itself, cannot be sharded: use "
            "strategy='ddp'."
        )


class RestingGrad(Tensor):
    """A gradient of full shape whose values are gathered when something looks at them.

    Attributes:
        zero_slot: What the engine knows of its parameter.
    """

    zero_slot: ParameterSlot

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        awaken = _awaken_eagerly if torch.compiler.is_compiling() else _awaken
        return awaken(func, args, kwargs)


METADATA = _metadata()
