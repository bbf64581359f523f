"""The loss of a run as a curve of braille dots, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longctx.runs.metrics import Row, finite, is_step

WIDTH, HEIGHT = 60, 8  # characters, each of 2 x 4 dots
FEWEST = 4  # points that show a curve
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille character, by place
BLANK = 0x2800


def loss_curve(rows: Sequence[Row]) -> list[str]:
    """Lines that show the loss over the steps of `rows`; none where there is no curve yet."""
    points = [
        (row["step"], row["loss"]) for row in rows if is_step(row) and finite([row.get("loss")])
    ]
    if len(points) < FEWEST:
        return []
    steps, losses = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    low, high = losses.min(), losses.max()
    columns = np.arange(2 * WIDTH)
    along = np.interp(columns, np.linspace(0, 2 * WIDTH - 1, 2), [steps[0], steps[-1]])
    heights = (high - np.interp(along, steps, losses)) / max(high - low, 1e-9)
    dots = np.rint(heights * (4 * HEIGHT - 1)).astype(int)
    canvas = np.full((HEIGHT, WIDTH), BLANK)
    for column, dot in zip(columns.tolist(), dots.tolist(), strict=True):
        canvas[dot // 4, column // 2] |= DOTS[column % 2][dot % 4]
    labels = [f"{high:.2f}", *[""] * (HEIGHT - 2), f"{low:.2f}"]
    margin = max(map(len, labels))
    first, last = f"{int(steps[0]):,}", f"step {int(steps[-1]):,}"
    return [
        f"{'loss':>{margin}}",
        *(
            f"{label:>{margin}} │{''.join(map(chr, line))}"
            for label, line in zip(labels, canvas.tolist(), strict=True)
        ),
        f"{'':>{margin}} └{'─' * WIDTH}",
        f"{'':>{margin}}  {first}{last:>{WIDTH - len(first)}}",
    ]
