"""``python -m lightning_zero``: the same as the ``lightning-zero`` script."""

from lightning_zero.cli import script

if __name__ == "__main__":  # ranks that are spawned import this file once more
    script()
