"""A flame graph of sampled stacks: who was running under one function, as an SVG picture.

    py-spy record --pid PID --function --format raw --output stacks.txt
    python tools/draw_flame_graph.py stacks.txt picture.svg --root "Engine.step ("

A line of the file is a stack, outermost frame first, frames separated by semicolons, and how often it was seen.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

WIDTH, ROW, MARGIN, HEAD = 1200, 18, 8, 44
CHARACTER = 6.3  # width of one at the size used
COLOURS = {
    "sampling": "#f4a259",
    "speculation": "#e8c547",
    "kv_cache": "#8cb369",
    "engine": "#5b8e7d",
    "drafters": "#c97b84",
    "runtimes": "#7fa6c9",
    "": "#c8c8c8",  # other people's
}
_FRAME = re.compile(r"(?P<name>.*) \((?P<file>[^()]*?)(:\d+)?\)$")


@dataclass(slots=True)
class Frame:
    """A function under its callers: how many samples were in it or below."""

    samples: int = 0
    below: dict[str, "Frame"] = field(default_factory=dict)

    def add(self, stack: list[str], count: int) -> None:
        """Count a stack, outermost first, that was seen below this frame."""
        self.samples += count
        if stack:
            self.below.setdefault(stack[0], Frame()).add(stack[1:], count)

    @property
    def depth(self) -> int:
        return 1 + max((frame.depth for frame in self.below.values()), default=0)

    def totals(self) -> dict[str, int]:
        """Samples by function, wherever it was called from."""
        found: dict[str, int] = {}
        for name, frame in self.below.items():
            for inner, samples in frame.totals().items():
                found[inner] = found.get(inner, 0) + (samples if inner != name else 0)
            found[name] = found.get(name, 0) + frame.samples
        return found


def read_stacks(text: str, root: str) -> Frame:
    """The samples that have a frame which begins with `root`, from that frame on."""
    top = Frame()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        at = next((index for index, frame in enumerate(frames) if frame.startswith(root)), None)
        if at is not None:
            top.add(frames[at:], int(count))
    return top


def draw(top: Frame, title: str, unit_ms: float) -> str:
    """The picture as SVG text.

    Args:
        unit_ms: milliseconds that one sample stands for.
    """
    height = HEAD + ROW * (top.depth - 1) + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="10.5">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="17" font-size="12.5" fill="#222222">{escape(title)}</text>',
    ]
    x = float(MARGIN)
    for folder, colour in COLOURS.items():
        label = folder or "numpy, Python"
        parts.append(f'<rect x="{x}" y="25" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="34" fill="#222222">{label}</text>')
        x += 30 + CHARACTER * len(label)
    _draw_below(parts, top, float(MARGIN), HEAD, (WIDTH - 2 * MARGIN) / max(1, top.samples), unit_ms)
    return "\n".join([*parts, "</svg>\n"])


def _draw_below(parts: list[str], frame: Frame, x: float, y: int, scale: float, unit_ms: float) -> None:
    for name, child in sorted(frame.below.items(), key=lambda item: -item[1].samples):
        width = child.samples * scale
        if width >= 1.0:
            label = f"{name.split(' (')[0]} {child.samples * unit_ms:.3f}"
            shown = label if len(label) * CHARACTER < width - 4 else label[: max(0, int((width - 4) / CHARACTER) - 1)]
            parts.append(
                f'<g><title>{escape(name)}: {child.samples * unit_ms:.3f} ms</title><rect x="{x:.1f}" y="{y}" width="{width - 0.5:.1f}" '
                f'height="{ROW - 1}" fill="{_colour(name)}"/><text x="{x + 3:.1f}" y="{y + 12}" fill="#222222">{escape(shown)}</text></g>'
            )
            _draw_below(parts, child, x, y + ROW, scale, unit_ms)
        x += width


def _short(frame: str) -> str:
    """A frame without the path in front of its package and without a line."""
    match = _FRAME.match(frame)
    if match is None:
        return frame
    file = re.sub(r".*/(?=(paceline|tools|tests|site-packages|python3\.\d+)/)", "", match["file"])
    return f"{match['name']} ({file})"


def _colour(name: str) -> str:
    match = re.search(r"\(paceline/(\w+)/", name)
    return COLOURS.get(match[1] if match else "", COLOURS[""])


def table(top: Frame, unit_ms: float, count: int) -> Mapping[str, float]:
    """Milliseconds in the `count` functions that take most, callees included."""
    totals = sorted(top.totals().items(), key=lambda item: -item[1])[:count]
    return {name: samples * unit_ms for name, samples in totals}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--root", default="Engine.step (", help="beginning of the frame at the top")
    parser.add_argument("--title", default="samples")
    parser.add_argument("--sample-ms", type=float, default=1.0, help="milliseconds a sample stands for")
    options = parser.parse_args()
    top = read_stacks(options.stacks.read_text(encoding="utf-8"), options.root)
    options.picture.write_text(draw(top, options.title, options.sample_ms), encoding="utf-8")
    for name, milliseconds in table(top, options.sample_ms, 40).items():
        print(f"{milliseconds:8.3f}  {name}")


if __name__ == "__main__":
    main()
