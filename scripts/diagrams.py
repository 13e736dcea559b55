# SPDX-License-Identifier: Apache-2.0
"""Draw `docs/images/*.mmd` as SVG, by Mermaid in a Chromium: pages show them where nobody can load Mermaid.

npm pack mermaid && tar xzf mermaid-*.tgz
python scripts/diagrams.py package/dist/mermaid.min.js
"""

import argparse
import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

from vllm_fp8ext.bench.pages import FAINT, INK, PAPER, themed

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SETTINGS = {
    "startOnLoad": False,
    "theme": "base",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False},
    "sequence": {
        "useMaxWidth": False,
        "mirrorActors": False,
        "wrap": True,
        "width": 140,
        "actorMargin": 90,
        "messageFontSize": 18,
        "noteFontSize": 18,
        "actorFontSize": 18,
        "boxMargin": 6,
        "messageMargin": 28,
    },
    "themeVariables": {
        "fontFamily": "sans-serif",
        "fontSize": "15px",
        "background": PAPER,
        **dict.fromkeys(("primaryColor", "secondaryColor", "tertiaryColor", "mainBkg", "clusterBkg"), PAPER),
        **dict.fromkeys(("edgeLabelBackground", "noteBkgColor", "actorBkg", "labelBoxBkgColor"), PAPER),
        **dict.fromkeys(
            ("primaryTextColor", "textColor", "lineColor", "signalColor", "signalTextColor"), INK
        ),
        **dict.fromkeys(("actorTextColor", "noteTextColor", "loopTextColor", "labelTextColor"), INK),
        **dict.fromkeys(("primaryBorderColor", "nodeBorder", "clusterBorder", "actorBorder"), FAINT),
        **dict.fromkeys(("noteBorderColor", "labelBoxBorderColor", "actorLineColor"), FAINT),
    },
}
"""Settings of Mermaid: the colours of the other pictures."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw docs/images/*.mmd as SVG.")
    parser.add_argument("mermaid", type=Path, help="mermaid.min.js of the package mermaid of npm")
    parser.add_argument("--chromium", default="chromium", help="a Chromium's command")
    options = parser.parse_args()
    for source in sorted(IMAGES.glob("*.mmd")):
        drawn = draw(source.read_text(), options.mermaid.resolve(), options.chromium)
        source.with_suffix(".svg").write_text(f"{drawn}\n<!-- {fingerprint(source)} -->\n")


def fingerprint(source: Path) -> str:
    """Return what tells a diagram's source from others."""
    return hashlib.sha256(source.read_bytes()).hexdigest()


def draw(source: str, mermaid: Path, chromium: str) -> str:
    """Return the SVG of a diagram."""
    page = (
        f'<body><script src="{mermaid.as_uri()}"></script><script>mermaid.initialize({json.dumps(SETTINGS)});'
        f'mermaid.render("d", {json.dumps(source)}).then(({{svg}}) => {{ document.body.textContent = svg; }})'
        "</script></body>"
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page)
        line = [chromium, "--headless", "--no-sandbox", "--virtual-time-budget=10000", "--dump-dom"]
        dom = subprocess.run([*line, file.as_uri()], capture_output=True, text=True, check=True).stdout
    escaped = re.search(r"&lt;svg.*&lt;/svg&gt;", dom, re.DOTALL)
    if escaped is None:
        raise SystemExit(f"Mermaid drew nothing: {dom[-2000:]}")
    text = (
        escaped[0].replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u00a0").replace("&amp;", "&")
    )
    return themed(_plain(text))


def _plain(svg: str) -> str:
    """Return an SVG on a ground of its own, with no colours but those of `SETTINGS`."""
    svg = re.sub(r"#010101|#000000|#000\b", INK, svg)
    svg = re.sub(r"hsl\([^)]*\)|#e4e0db", FAINT, svg)
    svg = re.sub(r"rgba\(254, 254, 254, [^)]*\)", PAPER, svg)
    box = re.search(r'viewBox="(\S+) (\S+) (\S+) (\S+)"', svg)
    assert box is not None
    x, y, width, height = box.groups()
    ground = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" style="fill: {PAPER}"/>'
    return re.sub(r"(<svg [^>]*>)", rf"\1{ground}", svg, count=1)


if __name__ == "__main__":
    main()
