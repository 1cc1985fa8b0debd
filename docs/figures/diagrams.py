"""The diagrams of docs/concepts.md: `python docs/figures/diagrams.py` writes them anew.

Each has a ground of its own and follows the reader's light or dark, so it can be read on any page.
"""

import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Light and dark: ground, lines, words, faint words; then fills by meaning.
STYLE = """
  .ground { fill: #ffffff } .line { stroke: #444b57; fill: none; stroke-width: 1.5 }
  .box { stroke: #444b57; stroke-width: 1.2 } text { fill: #1c2026; font: 13px sans-serif }
  .small { font-size: 11px } .faint { fill: #59616e } .bold { font-weight: bold }
  .own { fill: #d6e6f7 } .rank { fill: #f9e3c8 } .far { fill: #eceff3 }
  .decode { fill: #cfe3d2 } .prefill { fill: #f6d9b0 } .kept { fill: #dcd8ee }
  .lost { fill: #f3c6c6 } .tip { fill: #444b57 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #20242b } .line, .box { stroke: #aab2bf } text { fill: #e6e9ee }
    .faint { fill: #a3abb8 } .tip { fill: #aab2bf }
    .own { fill: #274863 } .rank { fill: #6a4a22 } .far { fill: #343a44 }
    .decode { fill: #2d5b3b } .prefill { fill: #7a5420 } .kept { fill: #453f6e }
    .lost { fill: #7a3434 }
  }
"""


class Drawing:
    """One picture; places are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, kind: str, *lines: str) -> None:
        """A box with words in its middle, the first of several in bold."""
        self._parts.append(
            f'<rect class="box {kind}" x="{x}" y="{y}" width="{w}" height="{h}" rx="5"/>'
        )
        top = y + h / 2 - 8 * (len(lines) - 1) + 4
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 and len(lines) > 1 else "small" if number else ""
            self._text(x + w / 2, top + 16 * number, line, weight, "middle")

    def words(
        self, x: int, y: int, text: str, kind: str = "small faint", at: str = "start"
    ) -> None:
        """A line of words by itself."""
        self._text(x, y, text, kind, at)

    def arrow(self, x1: int, y1: int, x2: int, y2: int, both: bool = False) -> None:
        """From one place to another, or both ways."""
        tail = ' marker-start="url(#tip)"' if both else ""
        self._parts.append(
            f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" '
            f'marker-end="url(#tip)"{tail}/>'
        )

    def line(self, x1: int, y1: int, x2: int, y2: int) -> None:
        """A broken line."""
        self._parts.append(
            f'<line class="line" stroke-dasharray="4 4" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'
        )

    def svg(self) -> str:
        """The file."""
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}"'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} height="{self._height}"',
                'role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<style>{STYLE}</style>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto-start-reverse"><path class="tip" d="M0 0 8 4 0 8z"/>'
                "</marker></defs>",
                f'<rect class="ground" width="{self._width}" height="{self._height}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            )
        )

    def _text(self, x: float, y: float, text: str, kind: str, at: str) -> None:
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{at}">{escape(text)}</text>'
        )


def shape() -> Drawing:
    """Who talks to whom."""
    d = Drawing(720, 400, "Clients, gateway, scheduler and workers")
    d.box(20, 20, 210, 52, "far", "gRPC clients", "Python, Go, Node, Java, C++, Rust")
    d.box(490, 20, 210, 52, "far", "OpenAI SDKs, curl", "HTTP, server-sent events")
    d.box(490, 112, 210, 52, "own", "gateway", "a gRPC client, holds no model")
    d.arrow(595, 72, 595, 110)
    d.box(180, 190, 360, 84, "own", "scheduler", "queue, slot table, tokenizer, constraints")
    d.words(360, 262, "journal, health, metrics; no torch, no GPU", at="middle")
    d.arrow(125, 72, 230, 188)
    d.arrow(560, 164, 470, 188)
    d.words(30, 128, "slotwise.v1.Inference")
    d.words(30, 144, "grpc.health.v1, reflection")
    d.box(90, 320, 220, 60, "rank", "worker, rank 0", "weights, a KV cache per slot")
    d.box(410, 320, 220, 60, "rank", "worker, rank 1", "one process per GPU")
    d.arrow(270, 274, 220, 318, both=True)
    d.arrow(450, 274, 500, 318, both=True)
    d.arrow(312, 350, 408, 350, both=True)
    d.words(360, 342, "sums", at="middle")
    d.words(360, 302, "StepCommand, StepResult", at="middle")
    return d


def life() -> Drawing:
    """What happens to one request."""
    d = Drawing(760, 230, "The life of a request")
    steps = (
        ("far", "Generate", "validate, tokenize"),
        ("far", "queue", "first come first"),
        ("kept", "slot", "prefix reused"),
        ("prefill", "prefill", "in chunks"),
        ("decode", "decode", "with all others"),
        ("far", "Finished", "reason, usage, timings"),
    )
    for number, (kind, *lines) in enumerate(steps):
        x = 14 + 124 * number
        d.box(x, 60, 108, 64, kind, lines[0])
        d.words(x + 54, 142, lines[1], at="middle")
        if number:
            d.arrow(x - 16, 92, x - 2, 92)
    d.words(68, 44, "Accepted", at="middle")
    d.words(440, 44, "first token", at="middle")
    d.arrow(440, 48, 440, 58)
    d.words(564, 44, "deltas", at="middle")
    d.words(68, 184, "full: RESOURCE_EXHAUSTED", at="start")
    d.line(192, 126, 160, 172)
    d.words(300, 184, "cancel, deadline, lost client: the slot is free within two steps")
    d.line(440, 150, 440, 172)
    d.words(300, 206, "workers lost: prompt and tokens so far are prefilled again, same bits")
    return d


def slots() -> Drawing:
    """Where a prompt finds its beginning."""
    d = Drawing(720, 300, "Slots and the prefix cache")
    d.words(20, 28, "slot", "bold")
    d.words(90, 28, "what it holds, by position", "bold")
    d.words(610, 28, "state", "bold")
    rows = (
        (("decode", 260, "conversation A"), ("decode", 60, "new"), "decodes"),
        (("kept", 330, "conversation B, ended"), None, "free, kept"),
        (("kept", 150, "system prompt"), ("prefill", 120, "question C"), "prefills"),
        (None, None, "free, empty"),
    )
    for number, (first, second, state) in enumerate(rows):
        y = 44 + 52 * number
        d.box(20, y, 40, 34, "far", str(number))
        x = 90
        for part in (first, second):
            if part is not None:
                d.box(x, y, part[1], 34, part[0], part[2])
                x += part[1]
        d.words(610, y + 22, state)
    d.arrow(420, 113, 470, 113)
    d.words(474, 108, "B goes on: slot 1")
    d.words(474, 122, "is taken as it is")
    d.words(
        20,
        262,
        "A prompt that begins as any slot does, busy or free, gets a copy of that on the device;",
    )
    d.words(
        20, 280, "tokens are compared one by one, never a hash, and only under the same cache_salt."
    )
    return d


def timeline() -> Drawing:
    """Commands run ahead of their results."""
    d = Drawing(760, 260, "The timeline of steps")
    d.words(14, 60, "scheduler", "bold")
    d.words(14, 130, "device", "bold")
    d.words(14, 200, "client", "bold")
    bars = (
        (110, 100, "decode", "step 1: A B"),
        (212, 100, "decode", "step 2: A B"),
        (314, 190, "prefill", "step 3: A B + chunk of C"),
        (506, 100, "decode", "step 4: A B C"),
        (608, 100, "decode", "step 5: A B C"),
    )
    for x, w, kind, text in bars:
        d.box(x, 108, w, 36, kind, text)
    for number, x in enumerate((104, 150, 252, 346, 534)):
        d.box(x, 42, 26, 26, "own", str(number + 1))
        d.arrow(x + 13, 70, bars[number][0] + 6, 106)
    for x in (210, 312, 504, 606, 708):
        d.arrow(x, 146, x + 12, 186)
    d.words(222, 200, "tokens", at="middle")
    d.words(324, 200, "tokens", at="middle")
    d.words(516, 200, "C's first token", at="middle")
    d.words(618, 200, "tokens", at="middle")
    d.words(110, 28, "a command is sent while the one before runs: no step waits for a round trip")
    d.words(
        110,
        240,
        "C waits for the commands that are out, then rides along: one forward reads the weights",
    )
    return d


def recovery() -> Drawing:
    """A rank dies, streams go on."""
    d = Drawing(760, 270, "A lost worker")
    d.words(14, 64, "rank 0", "bold")
    d.words(14, 124, "rank 1", "bold")
    d.words(14, 184, "stream", "bold")
    d.box(90, 42, 190, 34, "decode", "steps of epoch 1")
    d.box(282, 42, 200, 34, "kept", "keeps its weights, leaves")
    d.box(90, 102, 190, 34, "decode", "steps of epoch 1")
    d.box(282, 102, 200, 34, "lost", "killed; a new process loads")
    d.box(484, 42, 90, 34, "prefill", "prefill")
    d.box(484, 102, 90, 34, "prefill", "prefill")
    d.box(576, 42, 170, 34, "decode", "steps of epoch 2")
    d.box(576, 102, 170, 34, "decode", "steps of epoch 2")
    d.box(90, 162, 190, 34, "far", "tokens 0 ... 41")
    d.box(576, 162, 170, 34, "far", "tokens 42 ...")
    d.words(430, 184, "stands still", at="middle")
    d.line(282, 30, 282, 214)
    d.line(576, 30, 576, 214)
    d.words(286, 228, "NOT_SERVING within 2 s")
    d.words(572, 228, "SERVING", at="end")
    d.words(
        90,
        254,
        "prompt and tokens so far are prefilled again, with the bits that decoding gave them",
    )
    return d


def drawings() -> dict[str, str]:
    """Every file's text by its name."""
    makers = (shape, life, slots, timeline, recovery)
    return {f"concept-{make.__name__}.svg": make().svg() for make in makers}


if __name__ == "__main__":
    for file_name, text in drawings().items():
        (FOLDER / file_name).write_text(text)
    sys.exit()
