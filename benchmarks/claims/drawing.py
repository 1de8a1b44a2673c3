"""What the pictures of README and docs share: a style for light and dark pages, lines and words of an SVG."""

from __future__ import annotations

import html

STYLE = """
text{fill:#1b1f24;font:14px system-ui,sans-serif}.end{text-anchor:end}.middle{text-anchor:middle}
.strong{font-weight:600}.soft{fill:#59636e;font-size:12px}.rule{stroke:#d1d9e0}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.rule{stroke:#3d444d}}
"""


def text(style: str, x: float, y: float, content: str) -> str:
    """Words at a place."""
    return f'<text class="{style}" x="{x}" y="{y}">{html.escape(content)}</text>'


def line(style: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    """A line between two places."""
    return f'<line class="{style}" x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}"/>'
