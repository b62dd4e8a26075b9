"""The two forms of an optimizer's state dict: by parameter name, and by number as torch has it."""

from __future__ import annotations

from typing import Any

from lightning_zero.checkpoint.entries import TensorEntry


def by_number(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Number the parameters in the order of the param groups."""
    groups = optimizer["param_groups"]
    names = [name for group in groups for name in group["params"]]
    if all(isinstance(name, int) for name in names):
        state = {_as_number(key): value for key, value in optimizer["state"].items()}
        return {**optimizer, "state": state}
    numbers = {name: number for number, name in enumerate(names)}
    state = optimizer["state"]
    return {
        **optimizer,
        # Most torch optimizers go through their state in this order, and so does a full save. What
        # belongs to no parameter is the optimizer's own.
        "state": {
            **{number: state[name] for name, number in numbers.items() if name in state},
            **{key: value for key, value in state.items() if key not in numbers},
        },
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }


def _as_number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def reordered(
    optimizer: dict[str, Any], saved: list[list[str]], now: list[list[str]], where: str
) -> dict[str, Any]:
    """List the numbers in param groups in the order in which the optimizer has the names now.

    Args:
        optimizer: The state dict, numbered in the order of ``saved``.
        saved: The names by group, as they were.
        now: The names by group, as they are.
        where: The checkpoint, for messages.

    Raises:
        ValueError: If a name is in one of the two only, or in another group.
    """
    places, expected = (
        {name: group for group, names in enumerate(groups) for name in names}
        for groups in (saved, now)
    )
    wrong = [
        *(f"'{name}' is in the checkpoint only" for name in places if name not in expected),
        *(f"'{name}' is not in the checkpoint" for name in expected if name not in places),
        *(
            f"'{name}' was in group {places[name]} and is in group {group}"
            for name, group in expected.items()
            if places.get(name, group) != group
        ),
    ]
    if wrong:
        more = f" ({len(wrong)} such)" if len(wrong) > 1 else ""
        raise ValueError(
            f"{where}: the optimizer's parameters are not those of the checkpoint, {wrong[0]}"
            f"{more}: build the model and its param groups as they were when it was saved"
        )
    numbers = {name: number for number, name in enumerate(n for names in saved for n in names)}
    groups = zip(optimizer["param_groups"], now, strict=True)
    return {
        **optimizer,
        "param_groups": [
            {**group, "params": [numbers[name] for name in names]} for group, names in groups
        ],
    }


def names_of(optimizer: dict[str, Any]) -> list[list[str]] | None:
    """Return the parameters' names by group; None where a state dict has only numbers."""
    groups = [
        group["params"] if _are_names(group["params"]) else group.get("param_names", [])
        for group in optimizer["param_groups"]
    ]
    complete = [*map(len, groups)] == [len(g["params"]) for g in optimizer["param_groups"]]
    return groups if complete else None


def by_name(
    optimizer: dict[str, Any],
    weights: dict[str, Any],
    where: str,
    names: list[list[str]] | None = None,
) -> dict[str, Any]:
    """Name the parameters, which a full checkpoint only numbers.

    Args:
        optimizer: The state dict.
        weights: Those of the same checkpoint.
        where: The checkpoint, for messages.
        names: Names by group. Without them each number is matched with the weights in order, by the
            shape of its state. That the order is the module's, as ``model.parameters()`` has it,
            nothing in a file can tell.

    Raises:
        ValueError: If there are no names, and a match is not the only possible one.
    """
    groups = optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if _are_names(numbers):
        return optimizer
    given = [name for group in names or [] for name in group]
    if len(given) != len(numbers):
        given = _match(optimizer["state"], numbers, weights, where, len(groups))
    table = dict(zip(numbers, given, strict=True))
    return {
        **optimizer,
        "state": {table.get(number, number): state for number, state in optimizer["state"].items()},
        "param_groups": [
            {**group, "params": [table[number] for number in group["params"]]} for group in groups
        ],
    }


def _are_names(params: list[Any]) -> bool:
    return all(isinstance(param, str) for param in params)


def _match(
    state: dict[int, dict[str, Any]],
    numbers: list[int],
    weights: dict[str, Any],
    where: str,
    groups: int,
) -> list[str]:
    entries = _candidates(weights)
    candidates = list(entries)
    fits = [
        [_fits(state.get(number, {}), entries[name].shape) for name in candidates]
        for number in numbers
    ]
    names = [candidates[position] for position in _only_way(fits, len(candidates)) or []]
    if len(names) != len(numbers) or groups > 1:
        raise ValueError(
            f"{where}: which of the optimizer's numbers is which parameter is not certain "
            f"({len(numbers)} parameters in {groups} param groups, {len(candidates)} weights). "
            "Give the optimizer named parameters (model.named_parameters()) when training, or pass "
            "--weights-only"
        )
    return names


def _candidates(weights: dict[str, Any]) -> dict[str, TensorEntry]:
    """List the weights that can be parameters: not the integers, nor a second name for one."""
    entries: dict[str, TensorEntry] = {}
    seen = set()
    for name, value in weights.items():
        if not isinstance(value, TensorEntry) or value.identity in seen:
            continue
        seen.add(value.identity)
        # Batch norms have these shaped like their parameters, right after them.
        statistic = name.rpartition(".")[2] in ("running_mean", "running_var")
        if not statistic and (value.dtype.is_floating_point or value.dtype.is_complex):
            entries[name] = value
    return entries


def _fits(state: dict[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether state can be that of a parameter of this shape."""
    shapes = {v.shape for v in state.values() if isinstance(v, TensorEntry) and v.shape}
    return not shapes or shape in shapes


def _only_way(fits: list[list[bool]], columns: int) -> list[int] | None:
    """Pair rows with columns, both in order; None if that can be done in no way or in several."""
    rows = len(fits)
    # ways[r][c]: in how many ways the rows from r fit into the columns from c, counted up to 2.
    ways = [[1 if row == rows else 0] * (columns + 1) for row in range(rows + 1)]
    for row in range(rows - 1, -1, -1):
        for column in range(columns - 1, -1, -1):
            taken = ways[row + 1][column + 1] if fits[row][column] else 0
            ways[row][column] = min(ways[row][column + 1] + taken, 2)
    if ways[0][0] != 1:
        return None
    found, column = [], 0
    for row in range(rows):
        while not (fits[row][column] and ways[row + 1][column + 1]):
            column += 1
        found.append(column)
        column += 1
    return found
