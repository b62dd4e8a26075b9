"""``lightning-zero plan``: the planner for a model that is named on the command line."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from jsonargparse import ArgumentParser, Namespace, get_loader
from lightning.pytorch.cli import instantiate_class
from torch import Tensor, nn, optim

from lightning_zero.cli import import_from_here
from lightning_zero.engine.kinds import OptimizerSharding
from lightning_zero.engine.numerics import Cast
from lightning_zero.planner.api import STRATEGIES, plan
from lightning_zero.planner.report import Plan
from lightning_zero.precision import DtypeName

_NAME = "lightning-zero plan"
_EXAMPLES = """\
examples:
  the class Module of my.py, in this folder, on 4 nodes of 8 devices:
    lightning-zero plan --model my.Module --model.width 512 --num-nodes 4 --precision bf16-mixed
  with what a run's settings say, whether it fits, and a picture:
    lightning-zero plan --config run.yaml --device-memory 80GB --plot plan.png
  with activations, for batches of 8 rows of 2048 tokens and their targets:
    lightning-zero plan --config run.yaml --batch 8x2048:int64,8x2048:int64
  the formulas of the ZeRO paper for 7.5 billion parameters on 64 ranks:
    lightning-zero plan --params 7.5e9 --devices 64
"""
_OF_STRATEGY = (
    "auto_wrap_policy bucket_mb prefetch reduce_every_backward optimizer_sharding cast "
    "reduce_dtype fp32_master"
).split()
_OF_TRAINER = ("num_nodes", "accumulate_grad_batches")


def run(arguments: Sequence[str]) -> int:
    """Plan and print.

    Args:
        arguments: What follows ``lightning-zero plan``.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: With status 2 after an error in the arguments, 0 after ``--help``.
        ValueError: As ``lightning_zero.plan`` raises it, and so are other errors.
    """
    import_from_here()
    words = [_with_dashes(word) for word in arguments]
    parser = _parser()
    options = parser.parse_args([*_from_files(words), *words])
    if options.get("model") is None and options.params is None:
        parser.error("give --model, --config with the settings of a run, or --params")
    planned = _plan(parser, options)
    print(planned.to_json() if options.json else planned)
    if options.plot is not None:
        planned.plot(options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    return 0


def _with_dashes(word: str) -> str:
    """Accept ``--num_nodes``, as the Trainer's argument is spelt, for ``--num-nodes``."""
    name, equals, value = word.partition("=")
    return (
        word
        if "." in name or not name.startswith("--")
        else name.replace("_", "-") + equals + value
    )


class _Parser(ArgumentParser):
    """A parser whose errors leave out a page of usage and its own bookkeeping."""

    _NOISE = re.compile(
        r"^ *(- )?(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|"
        r"- Expected a <class 'NoneType'>|Expected a path but .*|Given value.*)$\n?",
        re.MULTILINE,
    )

    def short(self, message: str) -> str:
        """Leave only what a user can act on."""
        return self._NOISE.sub("", message).strip().removeprefix("- ")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong and where the arguments are listed, and exit with status 2."""
        sys.stderr.write(f"{_NAME}: error: {self.short(message)}\n")
        sys.stderr.write(f'"{_NAME} --help" lists the arguments and shows examples.\n')
        raise SystemExit(2)


def _parser() -> _Parser:
    parser = _Parser(
        prog=_NAME,
        description="Say what each strategy would hold and send per rank, which fit, and which to "
        "take. Nothing is trained, and no GPU is needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_subclass_arguments(
        nn.Module, "model", required=False, help="class of the model; --model.NAME for arguments"
    )
    add = parser.add_argument
    add("--config", action="append", metavar="YAML", help="settings of 'lightning-zero fit'")
    add("--params", type=float, help="a number of parameters, for the paper's formulas")
    add("--strategy", type=str, default=",".join(STRATEGIES), help="what to plan, with commas")
    add("--devices", type=int, default=8, help="ranks per node")
    add("--num-nodes", type=int, default=1, help="nodes")
    add("--precision", type=str, default="32-true", help="as the Trainer's")
    add("--device-memory", type=str, help="of one device, as 80GB or 24GiB")
    add("--batch", type=str, help="shapes of one rank's batch, to count activations")
    add("--accelerator", type=Literal["gpu", "cpu"], default="gpu", help="where it will run")
    add("--accumulate-grad-batches", type=int, default=1, help="micro-batches per step")
    parser.add_subclass_arguments(
        optim.Optimizer,
        "optimizer",
        required=False,
        instantiate=False,
        skip={"params"},
        help="class of the optimizer, instead of the model's own",
    )
    add("--json", action="store_true", help="as JSON, in bytes")
    add("--plot", type=str, metavar="FILE", help="draw a picture, as plan.png")
    add("--on-cpu", action="store_true", help="build the model with values")
    strategy = parser.add_argument_group("arguments of ZeroStrategy that change memory or traffic")
    add = strategy.add_argument
    add("--auto-wrap-policy", type=str, default="auto", help="units of stage 3")
    add("--bucket-mb", type=float, default=25.0, help="size of units at stages 1 and 2")
    add("--prefetch", type=bool, default=True, help="gather the next unit early")
    add("--reduce-every-backward", type=bool, default=True, help="reduce every micro-batch")
    add("--optimizer-sharding", type=OptimizerSharding, default="auto", help="who steps on shards")
    add("--cast", type=Cast, default="auto", help="what mixed precision holds in half")
    add("--reduce-dtype", type=DtypeName | None, help="in which gradients are summed")
    add("--fp32-master", type=bool, default=False, help="masters of bf16-true and 16-true")
    return parser


def _plan(parser: _Parser, options: Namespace) -> Plan:
    settings = {name: options[name] for name in _OF_STRATEGY}
    policy = settings["auto_wrap_policy"]
    if "," in policy:
        settings["auto_wrap_policy"] = policy.split(",")
    chosen = options.get("optimizer")
    return plan(
        None if options.get("model") is None else _source(parser, options),
        params=options.params,
        strategies=options.strategy,
        devices=options.devices,
        num_nodes=options.num_nodes,
        precision=options.precision,
        device_memory=options.device_memory,
        batch=None if options.batch is None else parse_batch(options.batch),
        optimizer=None if chosen is None else _maker(chosen.as_dict()),
        accelerator=options.accelerator,
        accumulate_grad_batches=options.accumulate_grad_batches,
        **settings,
    )


def _source(parser: _Parser, options: Namespace) -> nn.Module | Callable[[], nn.Module]:
    def build() -> nn.Module:
        try:
            # jsonargparse has renamed it and warns of the older name.
            instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
            module: nn.Module = instantiate(options).model
        except ValueError as error:  # so it reports what a constructor has raised
            raise RuntimeError(parser.short(str(error))) from error
        return module

    build.__qualname__ = options.model.class_path
    return build() if options.on_cpu else build


def _maker(chosen: dict[str, Any]) -> Callable[[nn.Module], optim.Optimizer]:
    def make(module: nn.Module) -> optim.Optimizer:
        params = [param for param in module.parameters() if param.requires_grad]
        made: optim.Optimizer = instantiate_class((params,), chosen)
        return made

    return make


def parse_batch(text: str) -> Tensor | tuple[Tensor, ...]:
    """Make a batch of shapes such as ``8x3x224x224`` or ``8x128:int64,8:int64``.

    Returns:
        One tensor on the meta device, or a tuple if there are several; fp32 unless they say else.

    Raises:
        ValueError: If it cannot be read.
    """
    tensors = []
    for part in text.split(","):
        sizes, _, name = part.strip().partition(":")
        dtype = getattr(torch, name or "float32", None)
        if not re.fullmatch(r"\d+(x\d+)*", sizes) or not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"--batch {text!r}: {part!r} is not a shape with a dtype; write 8x3x224x224, or "
                "8x128:int64,8:int64 for a pair."
            )
        tensors.append(
            torch.empty([int(size) for size in sizes.split("x")], dtype=dtype, device="meta")
        )
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _from_files(words: Sequence[str]) -> list[str]:
    """Translate what settings of a run say of memory and traffic into arguments."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", action="append", default=[])
    found: list[str] = []
    for path in finder.parse_known_args(list(words))[0].config:
        settings = get_loader("yaml")(Path(path).read_text())
        if not isinstance(settings, Mapping):
            raise ValueError(f"{path} holds no settings: give what --print_config has written.")
        found += _arguments_of(settings.get("fit") or settings)
    return found


def _arguments_of(settings: Mapping[str, Any]) -> list[str]:
    found: dict[str, Any] = {}
    for name in ("model", "optimizer"):
        if settings.get(name):
            found[name] = json.dumps(settings[name])
    trainer = settings.get("trainer") or {}
    found.update({name: trainer.get(name) for name in _OF_TRAINER})
    found["precision"] = trainer.get("precision")
    devices = trainer.get("devices")
    found["devices"] = len(devices) if isinstance(devices, list) else devices
    if trainer.get("accelerator") == "cpu":
        found["accelerator"] = "cpu"
    strategy = trainer.get("strategy")
    if isinstance(strategy, Mapping) and str(strategy.get("class_path")).endswith("ZeroStrategy"):
        given = strategy.get("init_args") or {}
        found.update({name: given.get(name) for name in _OF_STRATEGY})
        if isinstance(found["auto_wrap_policy"], list):
            found["auto_wrap_policy"] = ",".join(found["auto_wrap_policy"])
    return [
        f"--{name.replace('_', '-')}={value}"
        for name, value in found.items()
        if value is not None and value != "auto"
    ]
