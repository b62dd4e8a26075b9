"""Convert a checkpoint of 1.6 GB with this package and with its peers: seconds and peak memory.

Run ``python tests/benchmarks/convert.py [folder]``. The checkpoints are made in the folder, a
temporary one by default, and removed. Each conversion is a process of its own, so that imports
count; the best of three runs is shown. DeepSpeed is shown if it can be imported.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

WIDTH = 1600
LAYERS = 11
VOCABULARY = 40_000
ROOT = Path(__file__).parents[2]

CHILD = """
import sys
{code}
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print("PEAK", line.split()[1])
"""

DEEPSPEED = (
    "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as run\n"
    "run({src!r}, {dst!r}, safe_serialization=True{more})"
)
CASES = [
    # Title, source, destination, code or None for our own command line.
    ("import torch", "", "", "import torch"),
    ("lightning_zero, .safetensors", "sharded", "a.safetensors", None),
    ("lightning_zero, .pt", "sharded", "a.pt", None),
    ("lightning_zero, .ckpt", "sharded", "a.ckpt", None),
    (
        "torch dcp_to_torch_save",
        "sharded",
        "b.pt",
        "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as run\n"
        "run({src!r}, {dst!r})",
    ),
    (
        "Lightning consolidate_checkpoint",
        "sharded",
        "c.ckpt",
        "import runpy\nsys.argv = ['x', {src!r}, '--output_file', {dst!r}]\n"
        "tool = 'lightning.fabric.utilities.consolidate_checkpoint'\n"
        "runpy.run_module(tool, run_name='__main__')",
    ),
    ("lightning_zero, ZeRO-3, .safetensors", "deepspeed", "d.safetensors", None),
    ("DeepSpeed zero_to_fp32", "deepspeed", "d", DEEPSPEED.replace("{more}", "")),
    (
        "DeepSpeed zero_to_fp32, shards of 300 MB",
        "deepspeed",
        "d",
        DEEPSPEED.replace("{more}", ", max_shard_size='300MB'"),
    ),
    ("lightning_zero, full .ckpt to sharded", "a.ckpt", "e", None),
]


def shapes() -> dict[str, tuple[int, ...]]:
    """The weights of a GPT of about 1.6 GB in fp32."""
    found: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn.qkv.weight": (3 * WIDTH, WIDTH),
            "attn.out.weight": (WIDTH, WIDTH),
            "mlp.up.weight": (4 * WIDTH, WIDTH),
            "mlp.down.weight": (WIDTH, 4 * WIDTH),
            "norm.weight": (WIDTH,),
            "norm.bias": (WIDTH,),
        }.items():
            found[f"h.{layer}.{name}"] = shape
    return found


def make_sharded(folder: Path) -> None:
    """Write the weights as two ranks would, each tensor cut in two along its first dimension."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    sys.path.insert(0, str(ROOT / "tests"))
    from boxes import Boxes

    weights = {name: torch.randn(shape) for name, shape in shapes().items()}
    cut = {name: Boxes.cut(tensor, 2) for name, tensor in weights.items()}
    dcp.save({"state_dict": cut}, storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({"epoch": 1, "global_step": 10, "loops": {}}, folder / "meta.pt")


def make_deepspeed(folder: Path) -> None:
    """Write the weights as two ranks of ZeRO stage 3 would."""
    tag = folder / "checkpoint"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    sizes = {name: torch.Size(shape) for name, shape in shapes().items()}
    share = sum(-(-math.prod(shape) // 2) for shape in sizes.values())
    for rank in range(2):
        model = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [sizes],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "ds_version": "0.19.8",
        }
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.randn(share)]}
        saved = {"optimizer_state_dict": state, "ds_version": "0.19.8"}
        torch.save(saved, tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def run(code: str, src: Path, dst: Path, module: bool) -> tuple[float, float] | None:
    """Run one conversion in a process of its own: seconds and peak MB, None if it failed."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if module:
        extra = ["--weights-only"] if dst.suffix in (".ckpt", "") else []
        command = [sys.executable, "-m", "lightning_zero", "convert", str(src), str(dst), *extra]
    else:
        command = [sys.executable, "-c", CHILD.format(code=code.format(src=str(src), dst=str(dst)))]
    os.sync()
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    if module:
        peak = float(done.stdout.split("peak memory ")[1].split()[0].replace(",", ""))
    else:
        peak = int(done.stdout.split("PEAK ")[1].split()[0]) * 1024 / 1e6
    return seconds, peak


def main() -> None:
    """Make the checkpoints, convert them in all ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where to work")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        make_sharded(work / "sharded")
        make_deepspeed(work / "deepspeed")
        total = sum(map(math.prod, shapes().values())) * 4
        print(
            f"{total / 1e9:.2f} GB in {len(shapes())} tensors, the largest "
            f"{max(map(math.prod, shapes().values())) * 4 / 1e6:.0f} MB; 2 ranks"
        )
        print(f"\n{'':40} {'seconds':>8} {'peak MB':>8}")
        for title, source, destination, code in CASES:
            results = []
            for _ in range(options.runs):
                target = work / destination if destination else work / "nothing"
                if target.is_dir():
                    shutil.rmtree(target)
                elif target.exists():
                    target.unlink()
                results.append(run(code or "", work / source, target, code is None))
            found = [result for result in results if result is not None]
            if found:
                seconds, peak = min(found)[0], min(peak for _, peak in found)
                print(f"{title:40} {seconds:8.1f} {peak:8.0f}", flush=True)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
