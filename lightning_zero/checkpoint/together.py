"""What all ranks do together, and fail at together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


class Together:
    """A context that raises on every rank what is raised on any.

    Args:
        group: The ranks, able to carry CPU tensors; None without ``torch.distributed``.
        what: What is written, for messages.

    Attributes:
        group: As given.
        is_first: Whether this is the rank that acts for all.
    """

    def __init__(self, group: ProcessGroup | None, what: object) -> None:
        self.group = group
        self.is_first = group is None or dist.get_rank(group) == 0
        self._what = what

    def first(self, act: Callable[[], T]) -> T:
        """Do something on the first rank, and return its result, which is small, on all.

        Raises:
            OSError: On every rank, if it fails.
        """
        result: list[Any] = [None]
        with self:
            if self.is_first:
                result[0] = act()
        if self.group is not None:
            dist.broadcast_object_list(result, group=self.group, group_src=0)
        made: T = result[0]
        return made

    def gathered(self, value: T) -> list[T]:
        """Return the values of all ranks, which are small, on the first one; none on the others."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size(self.group) if self.is_first else []
        dist.gather_object(value, found or None, group=self.group, group_dst=0)
        return found

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        texts: list[Any] = [None if error is None else f"{type(error).__name__}: {error}"]
        if self.group is not None:
            mine, texts = texts[0], [None] * dist.get_world_size(self.group)
            dist.all_gather_object(texts, mine, group=self.group)
        failed = {rank: text for rank, text in enumerate(texts) if text is not None}
        if failed:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise OSError(
                f"The checkpoint {self._what} could not be written ({told}). What was there before "
                "is untouched, and training can go on."
            ) from error
