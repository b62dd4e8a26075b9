"""Which parameters form a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

WrapPolicy = (
    Literal["auto", "none", "layers"]
    | str
    | Sequence[str]
    | set[type[nn.Module]]
    | Callable[[nn.Module, bool, int], bool]
)
"""How to choose units at stage 3: a word, class names, classes, or a function as FSDP takes it.

A string with dots is an import path, of a class or of a function.
"""

_SMALL = 2**14
"""Elements under which a module is no unit of its own: fewer cost as much to move as none."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# These read their children's parameters without calling the children.
_OPAQUE = (
    nn.MultiheadAttention,
    nn.RNNBase,
    torch.jit.ScriptModule,
)


@dataclass(frozen=True)
class UnitPlan:
    """The parameters that become one unit.

    Attributes:
        name: The module's name, or the bucket's.
        module: The module whose forward uses them, if there is one; the root for what is left over.
        params: Named parameters of one dtype and trainability, each under its first name.
        half: Whether forward passes read them in half precision.
    """

    name: str
    module: nn.Module | None
    params: tuple[tuple[str, nn.Parameter], ...]
    half: bool = False


def plan_buckets(
    module: nn.Module, bucket_mb: float, halves: Container[int] = ()
) -> list[UnitPlan]:
    """Fill units of about ``bucket_mb`` megabytes with parameters in the order of registration.

    The units come in the order of forward use; the last is the first to be complete in backward, so
    buckets are filled from the end. For ``halves`` see ``plan_units``.
    """
    limit = bucket_mb * 2**20
    plans: list[UnitPlan] = []
    for kind, half in _kinds(module.named_parameters(), halves):
        bucket: list[tuple[str, nn.Parameter]] = []
        size = 0
        for name, param in reversed(kind):
            bucket.insert(0, (name, param))
            size += param.numel() * param.element_size()
            if size >= limit:
                plans.append(UnitPlan(f"bucket {len(plans)}", None, tuple(bucket), half))
                bucket, size = [], 0
        if bucket:
            plans.append(UnitPlan(f"bucket {len(plans)}", None, tuple(bucket), half))
    # Buckets of several kinds fill side by side. One is complete when its first parameter is, and
    # is reduced in that order, or finished buckets of one kind would wait for those of another.
    place = {id(param): place for place, (_, param) in enumerate(module.named_parameters())}
    return sorted(plans, key=lambda plan: place[id(plan.params[0][1])])


def plan_units(
    module: nn.Module, policy: WrapPolicy, halves: Container[int] = ()
) -> list[UnitPlan]:
    """Divide a module into units that are gathered and released together.

    Args:
        module: The whole module, the root. What no other unit takes belongs to its unit.
        policy: ``"auto"``: repeated blocks (a class that occurs several times in one container) and
            other large layers. ``"none"``: the whole module is one unit. ``"layers"``: every module
            that holds parameters. Class names, classes, ``ModuleWrapPolicy`` or a function
            ``(module, recurse, nonwrapped_numel) -> bool``: the modules that they choose.
        halves: Parameters that forward passes read in half precision, by identity.

    Returns:
        Units in the order of registration, the root's first.

    Raises:
        ValueError: If the policy is an unknown word or names a class that the module does not use.
        TypeError: If the policy is of a type that is none of the above.
    """
    # Scripts take no hooks, so what surrounds them gathers for them.
    chosen = [c for c in _chosen(module, policy) if not isinstance(c, torch.jit.ScriptModule)]
    names = {id(child): name for name, child in module.named_modules()}
    by_name = {names[id(child)]: child for child in chosen}
    members: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, param in module.named_parameters():  # a tied one under the name of its first user
        owner = _innermost(name, by_name, module)
        members.setdefault(id(owner), []).append((name, param))
    order = {id(child): position for position, child in enumerate(module.modules())}
    plans = []
    for unit in sorted([*chosen, module], key=lambda unit: order[id(unit)]):
        kinds = _kinds(members.get(id(unit), ()), halves)
        for kind, half in kinds:
            name = names[id(unit)] or "root"
            if len(kinds) > 1:
                name += f" ({_describe(kind[0][1], half)})"
            plans.append(UnitPlan(name, unit, tuple(kind), half))
    return plans


def _describe(param: nn.Parameter, half: bool) -> str:
    words = ["half" if half else str(param.dtype).removeprefix("torch.")]
    if not param.requires_grad:
        words.append("frozen")
    return ", ".join(words)


def _innermost(name: str, chosen: dict[str, nn.Module], root: nn.Module) -> nn.Module:
    """Find the innermost chosen module around a parameter."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in chosen:
            return chosen[name]
    return root


def _kinds(
    params: Iterable[tuple[str, nn.Parameter]], halves: Container[int]
) -> list[tuple[list[tuple[str, nn.Parameter]], bool]]:
    """Divide parameters by what one flat buffer shares; say of each kind whether it has halves."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[str, nn.Parameter]]] = {}
    for name, param in params:
        kind = (param.dtype, param.requires_grad, id(param) in halves)
        kinds.setdefault(kind, []).append((name, param))
    return [(members, half) for (_, _, half), members in kinds.items()]


def _chosen(module: nn.Module, policy: Any) -> Iterator[nn.Module]:
    """List the modules that a policy makes units, inner ones first, without the root."""
    if policy == "auto":
        return _automatic(module)
    if policy == "none":
        return iter(())
    if policy == "layers":
        return _matching(module, _is_layer)
    if isinstance(policy, str):
        named = _imported(policy)
        policy = named if callable(named) and not isinstance(named, type) else [policy]
    if isinstance(policy, type) and issubclass(policy, nn.Module):
        policy = [policy]
    if hasattr(policy, "_module_classes"):  # ModuleWrapPolicy
        policy = policy._module_classes
    if isinstance(policy, (list, tuple, set, frozenset)):
        classes = _classes(module, policy)
        return _matching(module, lambda child: isinstance(child, classes))
    if callable(policy):
        return _by_function(module, policy)
    raise TypeError(
        f"auto_wrap_policy={policy!r} is a {type(policy).__name__}: give 'auto', 'none', 'layers', "
        "class names, a set of classes, or a function (module, recurse, nonwrapped_numel) -> bool."
    )


def _classes(module: nn.Module, wanted: Iterable[Any]) -> tuple[type[nn.Module], ...]:
    present = {type(child) for child in module.modules() if child is not module}
    found: set[type[nn.Module]] = set()
    for item in wanted:
        if isinstance(item, str):
            fits = {cls for cls in present if item in (cls.__name__, _path(cls))}
            named = None if fits else _imported(item)  # torch.nn.Linear is defined elsewhere
            if isinstance(named, type):
                fits = {cls for cls in present if issubclass(cls, named)}
        elif isinstance(item, type) and issubclass(item, nn.Module):
            fits = {cls for cls in present if issubclass(cls, item)}
        else:
            raise TypeError(
                f"auto_wrap_policy holds {item!r}, neither a class name nor a class of modules."
            )
        if not fits:
            name = item if isinstance(item, str) else item.__name__
            raise ValueError(
                f"auto_wrap_policy names {name!r}, but the module has no layer of that class. "
                f"Its classes: {', '.join(sorted(cls.__name__ for cls in present))}; "
                "or give 'auto', 'none' or 'layers'."
            )
        found |= fits
    return tuple(found)


def _imported(path: str) -> Any:
    """Return what an import path names, or None."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None) if module else None
    except (ImportError, TypeError):  # TypeError: it starts with a dot
        return None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _matching(
    module: nn.Module, wants: Callable[[nn.Module], bool], seen: set[int] | None = None
) -> Iterator[nn.Module]:
    seen = {id(module)} if seen is None else seen
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if not isinstance(child, _OPAQUE):
            yield from _matching(child, wants, seen)
        if wants(child):
            yield child


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, _OPAQUE) or any(True for _ in module.parameters(recurse=False))


def _by_function(module: nn.Module, policy: Callable[..., bool]) -> Iterator[nn.Module]:
    """Ask a function as FSDP does: whether to look inside a module, then whether to take it."""
    taken: set[int] = set()

    def visit(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            left = sum(p.numel() for p in child.parameters() if id(p) not in taken)
            if policy(module=child, recurse=True, nonwrapped_numel=left):
                yield from visit(child)
            left = sum(p.numel() for p in child.parameters() if id(p) not in taken)
            if left and policy(module=child, recurse=False, nonwrapped_numel=left):
                taken.update(id(p) for p in child.parameters())
                yield child

    return visit(module)


def _automatic(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = {id(module)} if seen is None else seen
    repeated = Counter(type(child) for child in module.children())
    for child in module.children():
        size = sum(param.numel() for param in child.parameters())
        if size < _SMALL or id(child) in seen:
            continue
        seen.add(id(child))
        is_block = isinstance(module, _CONTAINERS) and repeated[type(child)] > 1
        is_layer = isinstance(child, _OPAQUE) or is_parametrized(child) or not any(child.children())
        if not isinstance(child, _CONTAINERS) and (is_block or is_layer):
            yield child
        else:
            yield from _automatic(child, seen)
