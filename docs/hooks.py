"""What MkDocs lacks: pages from outside docs/, and links as they are written in the repository."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_log = logging.getLogger("mkdocs.hooks.lightning_zero")

ROOT = Path(__file__).parent.parent
_OUTSIDE = ("CONTRIBUTING.md", "tests/benchmarks/*.md", "examples/**/*.md", "examples/**/*.png")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_FETCHED = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\s\"'>]+")
_LINKED = re.compile(r"<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|preload)[^>]*//[^>]+")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures outside of docs/, under ``repository/``."""
    for pattern in _OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            uri = f"repository/{path.relative_to(ROOT).as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at pages of the site; where the repository has a file and the site has none,
    keep the words alone.
    """
    here = page.file.src_uri
    known = {_in_repository(file.src_uri): file.src_uri for file in files}
    known["README.md"] = "index.md"

    def relink(match: re.Match[str]) -> str:
        bang, text, target = match.groups()
        if re.match(r"[a-z]+:|#|//", target):
            return match[0]
        path, _, anchor = target.partition("#")
        there = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(here)), path))
        found = known.get(there) or known.get(f"{there}/README.md")
        if found is not None:
            uri = posixpath.relpath(found, posixpath.dirname(here) or ".")
            return f"{bang}[{text}]({uri}{'#' if anchor else ''}{anchor})"
        if (ROOT / there).exists():
            return text
        _log.warning("%s: the link %s leads nowhere", here, target)
        return match[0]

    fenced, lines = False, []
    for line in markdown.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        lines.append(line if fenced else _LINK.sub(relink, line))
    return "\n".join(lines)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Complain of pages that would load anything from elsewhere."""
    for match in (*_FETCHED.finditer(output), *_LINKED.finditer(output)):
        _log.warning("%s loads something from elsewhere: %s", page.file.src_uri, match[0])
    return output


def _in_repository(uri: str) -> str:
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"
