"""ZeRO stages 1, 2 and 3 for PyTorch Lightning.

Importing this package registers the strategies ``zero1``, ``zero2`` and ``zero3``, each also with
``_spawn``, ``_fork`` and ``_notebook``, for ``Trainer(strategy=...)``.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_zero.checkpoint.as_file import open_checkpoint
    from lightning_zero.engine.engine import ZeroEngine
    from lightning_zero.precision import ZeroPrecision
    from lightning_zero.strategy import ZeroStrategy
    from lightning_zero.timeline.callback import ZeroTimeline

__version__ = "0.1.0"
__all__ = ["ZeroEngine", "ZeroPrecision", "ZeroStrategy", "ZeroTimeline", "open_checkpoint"]


def _is_command(words: list[str]) -> bool:
    """Whether the interpreter was started to convert, inspect or help, and so needs no strategy.

    Registering needs Lightning, whose import takes 150 MB and some seconds, more than a conversion
    does. A wrong no costs only that; in these commands nothing asks for a strategy by name, and
    the classes below load on demand.
    """
    for place, word in enumerate(words[:-1]):
        script = place == 1 and Path(word).name == "lightning-zero"
        module = word == "lightning_zero" and words[place - 1] == "-m"
        if script or module:
            return words[place + 1] in ("convert", "inspect", "-h", "--help")
    return False


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _load()[name]


def _load() -> dict[str, Any]:
    from lightning_zero.checkpoint.as_file import open_checkpoint
    from lightning_zero.engine.engine import ZeroEngine
    from lightning_zero.precision import ZeroPrecision
    from lightning_zero.strategy import ZeroStrategy, register
    from lightning_zero.timeline.callback import ZeroTimeline

    register()
    names = {
        "ZeroEngine": ZeroEngine,
        "ZeroPrecision": ZeroPrecision,
        "ZeroStrategy": ZeroStrategy,
        "ZeroTimeline": ZeroTimeline,
        "open_checkpoint": open_checkpoint,
    }
    globals().update(names)
    return names


if not _is_command(sys.orig_argv):
    _load()
