"""The command line: ``lightning-zero`` and its commands.

Each command's module is imported when the command is given, so that none pays for another.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_TRAINING = {
    "fit": "train a LightningModule",
    "validate": "run its validation",
    "test": "run its test",
    "predict": "run its prediction",
}
_EXAMPLES = """\
examples:
  train the class Module of my.py, in this folder, on two devices at stage 3:
    lightning-zero fit --model my.Module --data my.Data --trainer.devices 2
  the same at stage 2:
    lightning-zero fit --model my.Module --data my.Data --trainer.strategy.stage 2
  write all settings into a file, change them there, and train with it:
    lightning-zero fit --model my.Module --data my.Data --print_config > run.yaml
    lightning-zero fit --config run.yaml
  say beforehand what each strategy would need, and which to take:
    lightning-zero plan --config run.yaml --device-memory 80GB
  look into a checkpoint, and make it one file of weights:
    lightning-zero inspect last.ckpt
    lightning-zero convert last.ckpt weights.safetensors

"lightning-zero COMMAND --help" lists what a command takes.
"""
_HARMLESS = (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, ImportError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The command and its arguments; those of the process by default.

    Returns:
        The exit status: 0, 1 for an error, 2 for wrong usage (then by ``SystemExit``).
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in _TRAINING:
        from lightning_zero.training import train

        train(arguments)
        return 0
    if words and words[0] == "plan":
        return _plan(words[1:])
    parser = argparse.ArgumentParser(
        prog="lightning-zero",
        description="Train LightningModules with ZeRO, and work with their checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    for name, text in _TRAINING.items():  # LightningCLI parses what follows them
        commands.add_parser(name, help=text, add_help=False)
    _add_plan(commands)
    _add_convert(commands)
    _add_inspect(commands)
    options = parser.parse_args(arguments)
    run = {"convert": _convert, "inspect": _inspect}[options.command]
    try:
        return run(options)
    except BrokenPipeError:
        return 1
    except _HARMLESS as error:
        print(f"lightning-zero {options.command}: {error}", file=sys.stderr)
        return 1


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "say what each strategy would hold and send, and which to take"
    commands.add_parser("plan", help=text, add_help=False)  # its module parses what follows it


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format",
        description="Convert a checkpoint; what to write follows from DST's suffix: .ckpt, "
        ".safetensors, .pt, or none for a sharded folder.",
    ).add_argument
    add("source", metavar="SRC", help="a sharded or DeepSpeed folder, .ckpt, .pt or .safetensors")
    add("destination", metavar="DST", help="what to write")
    add("--dtype", help="convert floating-point weights: fp32, bf16, fp16 or fp64")
    add("--weights-only", action="store_true", help="leave out optimizers and callbacks")
    add("--prefix", help="take only the weights whose names start so")
    add("--strip", action="store_true", help="remove the prefix from their names")
    add("--max-shard-size", metavar="SIZE", help="split .safetensors, for example 5GB")
    add("--to", choices=("ckpt", "safetensors", "pt", "sharded"), help="instead of DST's suffix")
    add(
        "--layout",
        choices=("fsdp", "model_parallel"),
        default="fsdp",
        help="whose loader a sharded folder is for (default: fsdp)",
    )
    add("--force", action="store_true", help="overwrite DST")
    add("--trust", action="store_true", help="let pickles in SRC run code")
    add("--quiet", action="store_true", help="no progress bar and no summary")


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    add = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint",
        description="Say what is in a checkpoint; the exit status is 1 if it is not whole.",
    ).add_argument
    add("source", metavar="SRC", help="any checkpoint that convert takes")
    add("--json", action="store_true", help="as JSON instead of a table")
    add("--trust", action="store_true", help="let pickles in SRC run code")


def _plan(arguments: Sequence[str]) -> int:
    from lightning_zero.planner.command import run

    try:
        return run(arguments)
    except BrokenPipeError:
        return 1
    except (*_HARMLESS, TypeError) as error:
        print(f"lightning-zero plan: {error}", file=sys.stderr)
        return 1


def import_from_here() -> None:
    """Let modules of the current directory be imported, as with ``python -m``."""
    here = str(Path.cwd())
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)


def _convert(options: argparse.Namespace) -> int:
    from lightning_zero.checkpoint.convert import convert

    summary = convert(
        options.source,
        options.destination,
        dtype=options.dtype,
        weights_only=options.weights_only,
        prefix=options.prefix,
        strip=options.strip,
        max_shard_size=options.max_shard_size,
        to=options.to,
        layout=options.layout,
        force=options.force,
        trust=options.trust,
        progress=not options.quiet,
    )
    if not options.quiet:
        print(summary)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from lightning_zero.checkpoint.inspect import inspect

    report = inspect(options.source, options.trust)
    print(report.to_json() if options.json else report)
    return 0 if report.whole else 1


def script() -> NoReturn:
    """Run as the ``lightning-zero`` script."""
    raise SystemExit(main())
