"""Numbers of a logarithmic axis. Only drawing imports this module, because it needs matplotlib."""

from __future__ import annotations

from matplotlib.ticker import LogFormatterSciNotation


class PlainFormatter(LogFormatterSciNotation):
    """Write 0.3 in place of 3 × 10⁻¹ on an axis of less than two decades of usual numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Return the text at a value."""
        text = super().__call__(x, pos)
        assert self.axis is not None
        low, high = sorted(self.axis.get_view_interval())
        is_plain = low > 1e-3 and high < min(1e5, 100 * low)
        return f"{x:g}" if text and is_plain else text
