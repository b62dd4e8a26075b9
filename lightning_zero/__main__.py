"""``python -m lightning_zero``: the same as the ``lightning-zero`` script."""

from lightning_zero.cli import script

script()
