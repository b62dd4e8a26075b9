"""What is damaged, missing, newer or hostile in a checkpoint is refused, and named."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import assert_same, load, no_leftovers

from lightning_zero.checkpoint import convert as module
from lightning_zero.checkpoint.convert import convert


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_sharded(tmp_path_factory.mktemp("ranks") / "sharded")


@pytest.fixture
def torn(sharded: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "torn"))


def test_a_missing_ranks_file_is_named(torn: Path, tmp_path: Path) -> None:
    (torn / "__1_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__1_0.distcp is missing.*embed.weight"):
        convert(torn, tmp_path / "a.pt")
    assert not (tmp_path / "a.pt").exists() and no_leftovers(tmp_path)


def test_a_truncated_ranks_file_is_named(torn: Path, tmp_path: Path) -> None:
    file = torn / "__2_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"__2_0.distcp: '.*truncated"):
        convert(torn, tmp_path / "a.ckpt")
    os.truncate(file, 100)
    with pytest.raises(ValueError, match=r"__2_0.distcp: 'model\..*truncated"):
        convert(torn, tmp_path / "a.pt")
    assert no_leftovers(tmp_path)


def test_of_a_folder_of_checkpoints_their_names_are_told(torn: Path, tmp_path: Path) -> None:
    checkpoints.write_full(tmp_path / "full.ckpt")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ValueError, match=r"not a folder.*name one of those in it: full\.ckpt, torn"
    ):
        convert(tmp_path, tmp_path / "a.pt")


def test_a_folder_without_metadata_is_torn(torn: Path, tmp_path: Path) -> None:
    (torn / ".metadata").unlink()
    with pytest.raises(FileNotFoundError, match="torn"):
        convert(torn, tmp_path / "a.pt")


def test_a_folder_without_the_rest_gives_weights_only(torn: Path, tmp_path: Path) -> None:
    (torn / "meta.pt").unlink()
    with pytest.raises(ValueError, match=r"meta.pt.*--weights-only"):
        convert(torn, tmp_path / "a.ckpt")
    convert(torn, tmp_path / "a.ckpt", weights_only=True)
    expected = checkpoints.weights()
    del expected["head.weight"]
    assert_same(load(tmp_path / "a.ckpt")["state_dict"], expected)


def edit_metadata(folder: Path, edit: Any) -> None:
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    edit(metadata)
    with open(folder / ".metadata", "wb") as file:
        pickle.dump(metadata, file)


def test_newer_formats_are_refused(torn: Path, tmp_path: Path) -> None:
    meta = torch.load(torn / "meta.pt")
    meta["lightning_zero"]["format"] = 2
    torch.save(meta, torn / "meta.pt")
    with pytest.raises(ValueError, match=r"meta.pt: 'lightning_zero' says format 2.*update"):
        convert(torn, tmp_path / "a.pt")
    edit_metadata(torn, lambda metadata: setattr(metadata, "version", "2.0.0"))
    with pytest.raises(ValueError, match=r"\.metadata: written in version 2.0.0.*update"):
        convert(torn, tmp_path / "a.pt")


def test_missing_keys_and_parts_are_named(torn: Path, tmp_path: Path) -> None:
    def forget_place(metadata: Any) -> None:
        for key in [key for key in metadata.storage_data if key.fqn == "model.layer.bias"]:
            del metadata.storage_data[key]

    def forget_chunk(metadata: Any) -> None:
        metadata.state_dict_metadata["model.layer.bias"].chunks.pop()

    def forget_weights(metadata: Any) -> None:
        for name in list(metadata.state_dict_metadata):
            if name.startswith("model."):
                del metadata.state_dict_metadata[name]

    for edit, message in [
        (forget_chunk, r"\.metadata: the parts of 'model.layer.bias' hold"),
        (forget_place, r"\.metadata: does not say where 'model.layer.bias' at"),
        (forget_weights, r"\.metadata: neither 'state_dict' nor 'model' is among its keys"),
    ]:
        edit_metadata(torn, edit)
        with pytest.raises(ValueError, match=message):
            convert(torn, tmp_path / "a.pt")


def test_parts_of_two_checkpoints_and_foreign_paths_are_refused(torn: Path, tmp_path: Path) -> None:
    def swap(metadata: Any) -> None:
        places = metadata.storage_data
        alone = next(key for key in places if key.fqn == "model.alone")
        count = next(key for key in places if key.fqn == "model.count")
        places[alone] = places[count]

    def leave(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../../secret"

    edit_metadata(torn, swap)
    with pytest.raises(ValueError, match=r"'model.alone': stored as torch.int64"):
        convert(torn, tmp_path / "a.pt")
    edit_metadata(torn, leave)
    with pytest.raises(ValueError, match="outside its folder"):
        convert(torn, tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".safetensors"])
def test_truncated_files_are_named(tmp_path: Path, suffix: str) -> None:
    full = checkpoints.write_full(tmp_path / "full.ckpt")
    file = tmp_path / f"a{suffix}"
    convert(full, file)
    size = file.stat().st_size
    for left in (size - 10, 200, 4):
        os.truncate(file, left)
        with pytest.raises(ValueError, match=f"a{suffix}: .*(truncated|damaged)"):
            convert(file, tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 1}, tmp_path / "none.ckpt")
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "list.pt": "expected a dict",
        "none.ckpt": "neither key 'state_dict'",
        "text.txt": "not a folder written by ranks",
        "empty": "not a folder written by ranks",
    }.items():
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / name, tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        convert(tmp_path / "gone", tmp_path / "a.safetensors")


def test_missing_files_of_deepspeed_and_of_shards_are_named(tmp_path: Path) -> None:
    folder = checkpoints.write_deepspeed(tmp_path / "folder", 3, 3)
    (folder / "checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="of rank 1 is missing"):
        convert(folder, tmp_path / "a.pt")
    (folder / "checkpoint/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="3 ranks wrote it"):
        convert(folder, tmp_path / "a.pt")
    full = checkpoints.write_full(tmp_path / "full.ckpt")
    files = convert(full, tmp_path / "m.safetensors", max_shard_size=400).files
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match=f"{files[0].name} is missing, which holds 'embed"):
        convert(files[-1], tmp_path / "a.pt")


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return Path.touch, (self.witness,)


def test_code_in_pickles_runs_only_when_trusted(torn: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    file = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {"a": torch.ones(2)}, "x": Evil(witness)}, file)
    with pytest.raises(ValueError, match=r"evil.ckpt: .*--trust"):
        convert(file, tmp_path / "a.safetensors")
    assert not witness.exists()
    convert(file, tmp_path / "a.safetensors", trust=True)
    assert witness.exists()
    witness.unlink()
    (torn / ".metadata").write_bytes(pickle.dumps(Evil(witness)))
    for trust in (False, True):
        with pytest.raises(ValueError, match=r"\.metadata: refused"):
            convert(torn, tmp_path / "b.pt", trust=trust)
    assert not witness.exists()


def test_a_failure_to_write_leaves_the_old_file(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(sharded, tmp_path / "a.pt")
    before = (tmp_path / "a.pt").read_bytes()

    def fail(tree: Any, file: Any, advance: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_archive", fail)
    with pytest.raises(OSError, match="No space left"):
        convert(sharded, tmp_path / "a.pt", force=True)
    assert (tmp_path / "a.pt").read_bytes() == before and no_leftovers(tmp_path)


def test_a_writer_that_loses_a_name_is_noticed(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.write_archive

    def lose(tree: Any, file: Any, advance: Any) -> None:
        write({key: value for key, value in tree.items() if key != "mask"}, file, advance)

    monkeypatch.setattr(module, "write_archive", lose)
    with pytest.raises(RuntimeError, match="'mask' should be"):
        convert(sharded, tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())
