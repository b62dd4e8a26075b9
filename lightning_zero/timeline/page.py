"""Writes a timeline as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
from importlib.resources import files

from lightning_zero.timeline.record import Timeline
from lightning_zero.timeline.words import explanation, headline


def as_page(timeline: Timeline) -> str:
    """Return the page: the template with the timeline's values in it."""
    template = files("lightning_zero.timeline").joinpath("page.html").read_text(encoding="utf-8")
    # A script ends at the first "</", wherever it stands.
    data = json.dumps(timeline.as_json(), separators=(",", ":")).replace("</", "<\\/")
    for mark, text in (
        ("__TITLE__", html.escape(headline(timeline))),
        ("__EXPLANATION__", html.escape(explanation(timeline))),
        ("__DATA__", data),
    ):
        template = template.replace(mark, text)
    return template
