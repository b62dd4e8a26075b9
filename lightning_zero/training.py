"""The commands that train: a ``LightningCLI`` for any importable module and data module."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_zero.cli import import_from_here
from lightning_zero.strategy import register

NAME = "lightning-zero"

_HEARING = 5.0
"""Seconds that the other ranks give rank 0 to report an error in the arguments."""


def train(arguments: Sequence[str] | None = None) -> None:
    """Run ``fit``, ``validate``, ``test`` or ``predict``.

    Modules of the current directory can be imported, as with ``python -m``.

    Args:
        arguments: The command and its arguments. Default: those of the process, which is what
            launchers that start the command once more for each rank will repeat.

    Raises:
        SystemExit: With status 2 after an error in the arguments, 0 after ``--help``.
    """
    import_from_here()
    register()
    ZeroCLI(
        args=None if arguments is None else list(arguments),
        parser_class=_Parser,
        parser_kwargs={"prog": NAME, "description": "Train any importable LightningModule."},
        save_config_callback=_SaveConfig,
        # As a class and not as a name, so that --trainer.strategy.stage=2 needs nothing before it.
        trainer_defaults={"strategy": {"class_path": "lightning_zero.ZeroStrategy"}},
    )


class ZeroCLI(LightningCLI):
    """``LightningCLI`` that ends with one message where settings are wrong.

    What the constructor of a model raises keeps its traceback.
    """

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            first = _first_cause(error)
            if not _raised_in(first, "jsonargparse", "lightning_zero"):
                raise first from None
            self._parser(self.subcommand).error(str(error), error)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except Exception as error:  # of the Trainer itself: its parts exist already
            return self._parser(self.subcommand).error(str(error), error)


def _first_cause(error: BaseException) -> BaseException:
    """Follow the causes: the parser reports what a constructor raised as a wrong value."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _raised_in(error: BaseException, *packages: str) -> bool:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    name = "" if place is None else place.tb_frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] in packages


class _Parser(LightningArgumentParser):
    """A parser whose errors leave out a page of usage and its own bookkeeping."""

    _NOISE = re.compile(
        r"^ *(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|"
        r"Given value type: .*|Given value: (Namespace|NestedArg)\(.*|)\n",
        re.MULTILINE,
    )

    _REQUIRED = re.compile(r"are required: (?:fit|validate|test|predict)\.")

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or "JSONARGPARSE_DEBUG" in os.environ:
            super().error(message, ex)
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            # Launchers end the other ranks once one has ended: where all fail, one speaks.
            time.sleep(_HEARING)
        text = self._NOISE.sub("", message + "\n").strip()
        text = self._REQUIRED.sub("are required: --", text)
        hint = f'"{NAME} --help" shows examples, "{NAME} COMMAND --help" all arguments.'
        if "dot import path string: zero" in text:
            hint = "A name takes no arguments: give the class ZeroStrategy and its stage."
        elif "invalid strategy name" in text:
            hint = "The names here are zero1, zero2 and zero3, and those with _spawn and the like."
        sys.stderr.write(f"{NAME}: error: {text}\n{hint}\n")
        raise SystemExit(2)


class _SaveConfig(SaveConfigCallback):
    """Saves the settings beside the logs, if there are any, and overwrites no file."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.log_dir if trainer.loggers else None
        if folder is None:
            return
        files, stem, number = get_filesystem(folder), Path(self.config_filename).stem, 0
        while files.isfile(os.path.join(folder, self.config_filename)) and not self.already_saved:
            number += 1
            self.config_filename = f"{stem}-{number}.yaml"
        super().setup(trainer, pl_module, stage)
