"""Writes the tables of arguments in docs/*.md from signatures and docstrings.

A table stands between ``<!-- arguments of lightning_zero.NAME -->`` and ``<!-- end -->``.
Run ``python docs/reference.py`` after changing an argument; a test fails if that was forgotten.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstring_parser import DocstringStyle, parse

DOCS = Path(__file__).parent
_TABLE = re.compile(r"(<!-- arguments of ([\w.]+) -->\n).*?(<!-- end -->)", re.S)


def main() -> None:
    """Bring every page up to date with this clone."""
    sys.path.insert(0, str(DOCS.parent))
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"{page.name} has changed")


def filled(text: str) -> str:
    """Return a page with its tables made anew."""
    return _TABLE.sub(lambda m: f"{m[1]}\n{table(named(m[2]))}\n\n{m[3]}", text)


def named(path: str) -> Any:
    """Find a public object by its dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def table(thing: Any) -> str:
    """Make the table of a class's or a function's arguments.

    Raises:
        ValueError: If an argument has no description, or a description no argument.
    """
    rows = ["| argument | type | default | what it does |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(text)} |"
        for name, kind, default, text in arguments(thing)
    ]
    return "\n".join(rows)


def arguments(thing: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, default and description of each argument, as Markdown.

    Raises:
        ValueError: If an argument has no description, or a description no argument.
    """
    init = thing.__init__ if inspect.isclass(thing) else thing
    hints = _hints(init)
    parsed = parse(inspect.getdoc(thing) or "", DocstringStyle.GOOGLE)
    # Google's attributes are parameters to the parser as well.
    params = [param for param in parsed.params if param.args[0] == "param"]
    texts = {param.arg_name: param.description or "" for param in params}
    signature = inspect.signature(thing).parameters
    wrong = {name for name in signature if not texts.get(name)} ^ (texts.keys() - signature.keys())
    if wrong:
        raise ValueError(
            f"{thing.__qualname__}: signature and docstring differ in {', '.join(sorted(wrong))}"
        )
    for name, parameter in signature.items():
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else f"`{_value(parameter.default)}`"
        yield name, _kind(hints.get(name, Any)), default, _markdown(texts[name])


def _hints(init: Any) -> dict[str, Any]:
    try:
        return get_type_hints(init)
    except NameError:  # names that are only there for type checkers
        return {name: str(hint) for name, hint in inspect.get_annotations(init).items()}


def _kind(hint: Any) -> str:
    if isinstance(hint, str):
        return f"`{hint}`"
    if hint is Any:
        return "any"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{_value(value)}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in get_args(hint))
    if hint is type(None):
        return "`None`"
    text = inspect.formatannotation(hint).replace("collections.abc.", "")
    text = re.sub(r"[a-z_][A-Za-z_]*[.](?=[A-Za-z])", "", text)  # names without their modules
    return f"`{text.replace(' | ', ' or ')}`"


def _value(value: Any) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _markdown(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    main()
