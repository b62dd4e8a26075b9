"""ZeRO stages 1, 2 and 3 for PyTorch Lightning.

Importing this package registers the strategies ``zero1``, ``zero2`` and ``zero3``, each also with
``_spawn``, ``_fork`` and ``_notebook``, for ``Trainer(strategy=...)``.
"""

from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.precision import ZeroPrecision
from lightning_zero.strategy import ZeroStrategy, register

__version__ = "0.1.0"
__all__ = ["ZeroEngine", "ZeroPrecision", "ZeroStrategy"]

register()
