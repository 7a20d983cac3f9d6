"""The cache: one row a token and layer, committed rows in front, the window behind them.

A target's row is its latent and roped key, a Llama head's its keys and values: this file only
knows how wide a row is. Shape suffixes: L layers, S rows, C row width, T tokens, W window rows.
"""

import torch
from torch import Tensor


class RowCache:
    """A preallocated [L, S, C] buffer with `length` committed rows."""

    def __init__(
        self, layers: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.row_LSC = torch.zeros(layers, capacity, width, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.row_LSC.shape[1]

    def write(self, layer: int, slot_T: Tensor, row_TC: Tensor) -> None:
        """Put a step's rows where the step says; nothing is committed by this."""
        self.row_LSC[layer].index_copy_(0, slot_T, row_TC)

    def rows(self, layer: int, end: int) -> Tensor:
        """The first `end` rows of a layer, a view."""
        return self.row_LSC[layer, :end]

    def commit(self, window_row: list[int]) -> None:
        """Make these window rows the next committed ones, in this order; the rest vanish.

        `window_row` is a path and so ascending: a row only ever moves forward, and the gather
        reads all rows before any is overwritten.
        """
        count, start = len(window_row), self.length
        assert all(a < b for a, b in zip(window_row, window_row[1:])), window_row
        if window_row != list(range(count)):
            source = torch.tensor(window_row, device=self.row_LSC.device) + start
            self.row_LSC[:, start : start + count] = self.row_LSC[:, source]
        self.length += count

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
