"""The documents say what is so: arguments, messages, links and commands."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_zero

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)


def reference() -> ModuleType:
    """Import the script that makes the tables of arguments."""
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the marker, if any, the language and the content of each fenced block."""
    pattern = r"(?:<!-- ([^>]*?) -->\n)?^ *```(\w*)[^\n]*\n(.*?)^ *```$"
    for match in re.finditer(pattern, text, re.M | re.S):
        yield match[1] or "", match[2], match[3]


def prose(text: str) -> str:
    """Leave out fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """List the anchors of a page's headings, as code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(path.read_text()), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found


# Arguments


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_tables_of_arguments_are_those_of_the_signatures(page: Path) -> None:
    text = page.read_text()
    assert reference().filled(text) == text, "run: python docs/reference.py"


@pytest.mark.parametrize("name", sorted({*lightning_zero.__all__} - {"ZeroEngine"}))
def test_the_page_of_arguments_has_every_one(name: str) -> None:
    text = (DOCS / "arguments.md").read_text()
    section = re.search(
        rf"<!-- arguments of lightning_zero\.{name} -->(.*?)<!-- end -->", text, re.S
    )
    assert section is not None
    for argument in inspect.signature(getattr(lightning_zero, name)).parameters:
        assert f"\n| `{argument}` |" in section[1]


def test_an_argument_without_a_description_is_an_error() -> None:
    def forgetful(told: int, untold: int = 1) -> None:
        """Do nothing.

        Args:
            told: Something.
        """

    with pytest.raises(ValueError, match="untold"):
        reference().table(forgetful)


@pytest.mark.parametrize("name", lightning_zero.__all__)
def test_public_names_are_in_the_api_reference(name: str) -> None:
    assert f"::: lightning_zero.{name}\n" in (DOCS / "api.md").read_text()


@pytest.mark.parametrize(
    ("heading", "theirs"),
    [
        ("From ddp", DDPStrategy),
        ("From ddp", DistributedDataParallel),
        ("From fsdp", FSDPStrategy),
        ("From fsdp", FullyShardedDataParallel),
        ("From deepspeed_stage_3", DeepSpeedStrategy),
        ("From ModelParallelStrategy (FSDP2)", ModelParallelStrategy),
        ("From ModelParallelStrategy (FSDP2)", fully_shard),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_argument_of_the_stock_strategies_has_a_row(heading: str, theirs: Any) -> None:
    text = (DOCS / "migrating.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    firsts = [row.split("|")[1] for row in section.splitlines() if row.startswith("|")]
    named = set(re.findall(r"`(\w+)`", " ".join(firsts)))
    missing = inspect.signature(theirs).parameters.keys() - named - {"self"}
    assert not missing


# Messages


def messages() -> set[str]:
    """Collect the texts of the package's source, with … for what is filled in."""
    found = set()
    for path in (ROOT / "lightning_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("%s", "…"))
            elif isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.add("".join(map(str, parts)))
    return found


def test_messages_in_the_documents_are_those_of_the_code() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    told = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(told) > 50
    known = messages()
    for message in told:
        pattern = ".*".join(map(re.escape, message.strip("… ").split("…")))
        assert any(re.search(pattern, text, re.S) for text in known), message


# Links and blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_code_can_be_parsed(page: Path) -> None:
    for _, language, content in blocks(page.read_text()):
        if language == "python":
            ast.parse(textwrap.dedent(content))
        elif language == "yaml":
            assert yaml.safe_load(content) is not None
        elif language == "bash":
            subprocess.run(["bash", "-n"], input=content, text=True, check=True)


def test_every_file_of_the_engine_has_its_place_in_the_list() -> None:
    text = (DOCS / "engine.md").read_text()
    table = text.split("\n| file | what it is for |\n")[1].split("\n\n")[0]
    named = set(re.findall(r"`(?:engine/)?(\w+\.py)`", table))
    files = {path.name for path in (ROOT / "lightning_zero/engine").glob("[a-z]*.py")}
    assert files <= named


def test_the_readme_compares_as_the_page_does() -> None:
    tables = [
        re.findall(r"^\| strategy \|.*\n(?:\|.*\n)+", path.read_text(), re.M)
        for path in (ROOT / "README.md", DOCS / "comparison.md")
    ]
    assert tables[0] and tables[0][0] == tables[1][0]


def test_the_site_has_every_page() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(page.name for page in DOCS.glob("*.md")) == sorted(
        page for page in listed if not page.startswith("repository/")
    )


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.parametrize("page", ["index.md", "choosing.md"])
def test_marked_commands_run(page: str, tmp_path: Path) -> None:
    """Write the files and run the commands of a page, from its top to its end."""
    (tmp_path / "bin").mkdir()
    for name, command in (("python", ""), ("lightning-zero", "-m lightning_zero ")):
        script = tmp_path / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command}"$@"\n')
        script.chmod(0o755)
    path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ran, printed = 0, ""
    for marker, language, content in blocks((DOCS / page).read_text()):
        if marker.startswith("file: "):
            (tmp_path / marker.removeprefix("file: ")).write_text(content)
        elif marker == "run":
            assert language == "bash"
            printed = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", content],
                cwd=tmp_path,
                env={**os.environ, "PATH": path, "PYTHONPATH": places},
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=240,
            ).stdout
            ran += 1
        elif marker == "output":  # lines may be cut short, and left out
            for part in re.split("[…\n]", content):
                assert part.strip() in printed, part
    assert ran > 0
