"""Dicts that ``torch.distributed.checkpoint`` does not write as they are, and their way back.

It turns keys into strings, and leaves out what is empty (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[Any, ...]

_PLAIN = (str, int, float, bool, type(None))


def odd_mappings(tree: Mapping[Any, Any]) -> dict[Path, list[Any]]:
    """List the keys of such dicts by their paths, which consist of strings and list indices.

    Keys that a pickle could not give back without running code are no reason to list a dict.
    """
    found: dict[Path, list[Any]] = {}
    _look(tree, (), found)
    return found


def _look(value: Any, path: Path, found: dict[Path, list[Any]]) -> None:
    if isinstance(value, Mapping):
        keys = list(value)
        if not (keys and all(isinstance(k, str) for k in keys)) and all(map(_is_plain, keys)):
            found[path] = keys
        for key, inner in value.items():
            _look(inner, (*path, str(key)), found)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _look(inner, (*path, number), found)


def _is_plain(key: Any) -> bool:
    return all(map(_is_plain, key)) if type(key) is tuple else type(key) in _PLAIN


def merged(found: Iterable[Mapping[Path, list[Any]]]) -> dict[Path, list[Any]]:
    """Join what ``odd_mappings`` found on several ranks, each of which may hold other keys."""
    keys: dict[Path, dict[Any, None]] = {}
    for odd in found:
        for path, mine in odd.items():
            keys.setdefault(path, {}).update(dict.fromkeys(mine))
    return {path: list(each) for path, each in keys.items()}


def with_mappings(tree: Any, odd: Mapping[Path, list[Any]]) -> Any:
    """Give the dicts of a tree that was read the keys that they had, and put the empty ones back.

    A dict that was empty on one rank, or had no such keys there, may have others of other ranks.

    Args:
        tree: Nested dicts and lists; it is changed.
        odd: What ``odd_mappings`` found in it, before it was written.
    """
    for path in sorted(odd, key=len, reverse=True):  # the outer ones still have strings
        holder = _holder(tree, path)
        if holder is None:
            continue
        last = path[-1]
        if isinstance(holder, list):
            holder.extend([None] * (last + 1 - len(holder)))
            read = holder[last] or {}
        else:
            read = holder.get(last, {})
        keys = {str(key): key for key in odd[path] if str(key) in read}
        holder[last] = {key: read[name] for name, key in keys.items()} | {
            name: value for name, value in read.items() if name not in keys
        }
    return tree


def _holder(tree: Any, path: Path) -> Any:
    """Return what holds the end of a path, if that can be reached."""
    for step, key in enumerate(path[:-1]):
        if isinstance(tree, dict) and key not in tree and type(path[step + 1]) is str:
            tree[key] = {}  # held nothing but empty ones
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree
