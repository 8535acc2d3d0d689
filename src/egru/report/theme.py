"""How figures look, on light and on dark paper. Colours from Okabe and Ito's set, which colour-blind people can tell
apart; dense models are grey, so that colour always means events."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from egru.report.run import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of one kind of paper. ``background`` is "none" for figures that lie on a page of their own colour."""

    name: str
    background: str
    ink: str
    muted: str
    faint: str
    dense: str
    event: tuple[str, ...]
    alarm: str
    value_colours: tuple[str, ...]
    """Of emitted values, from near zero to largest; away from the paper's own lightness throughout."""
    image_colours: str

    def context(self) -> AbstractContextManager[None]:
        """matplotlib's defaults in this theme, for figures made inside."""
        matplotlib = require_matplotlib()
        return matplotlib.rc_context(
            {
                "font.family": _fonts(),
                "font.size": 10,
                "text.usetex": False,
                "text.color": self.ink,
                "axes.facecolor": "none",
                "axes.edgecolor": self.faint,
                "axes.labelcolor": self.muted,
                "axes.labelsize": 9.5,
                "axes.titlesize": 10.5,
                "axes.titleweight": "bold",
                "axes.titlecolor": self.ink,
                "axes.titlelocation": "left",
                "axes.titlepad": 7,
                "axes.linewidth": 0.8,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": False,
                "xtick.color": self.faint,
                "ytick.color": self.faint,
                "xtick.labelcolor": self.muted,
                "ytick.labelcolor": self.muted,
                "xtick.labelsize": 9,
                "ytick.labelsize": 9,
                "figure.facecolor": self.background,
                "legend.frameon": False,
                "legend.fontsize": 10,
                "lines.linewidth": 1.8,
                "lines.solid_capstyle": "round",
            }
        )

    def colours(self, runs: Sequence[RunReport]) -> list[str]:
        """One colour per run: grey without events, a hue with them."""
        hues = iter(self.event * (1 + len(runs) // len(self.event)))
        return [next(hues) if run.event_layers else self.dense for run in runs]

    def value_map(self, both_signs: bool) -> "Colormap":
        """A colour map of emitted values: one ramp from zero, or two that meet in it."""
        require_matplotlib()
        from matplotlib.colors import LinearSegmentedColormap

        ramp = self.value_colours
        if both_signs:
            ramp = (self.alarm, self.faint, ramp[-1])
        return LinearSegmentedColormap.from_list(f"egru-{self.name}", list(ramp))

    def grid(self, axes: "Axes", which: str = "y") -> None:
        """Faint lines behind the data."""
        axes.set_axisbelow(True)
        axes.grid(True, axis=which, color=self.faint, linewidth=0.6, alpha=0.55)  # pyright: ignore[reportArgumentType]
        axes.tick_params(length=0 if which == "both" else 3)


LIGHT = Theme(
    name="light",
    background="white",
    ink="#1d2329",
    muted="#57606a",
    faint="#c4cad1",
    dense="#7d858e",
    event=("#0072b2", "#d55e00", "#009e73", "#aa4499"),
    alarm="#c1500a",
    value_colours=("#8fc7e8", "#2b8cc4", "#0b5a94", "#0a2a5c"),
    image_colours="gray_r",
)
DARK = Theme(
    name="dark",
    background="none",
    ink="#e8ebee",
    muted="#a3acb6",
    faint="#454c55",
    dense="#9aa3ad",
    event=("#56b4e9", "#e69f00", "#2fc7a0", "#d790c7"),
    alarm="#f0904c",
    value_colours=("#1f5f8f", "#3f9bd6", "#8fd0f5", "#f2faff"),
    image_colours="gray",
)


def require_matplotlib() -> Any:
    """matplotlib, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'egru[demo]'") from error
    return matplotlib


def _fonts() -> list[str]:
    """What the page's own text is likely set in, then the font that comes with matplotlib and has every glyph."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    wanted = ("Inter", "Helvetica Neue", "Segoe UI", "Arial", "Liberation Sans")
    return [next((name for name in wanted if name in installed), "DejaVu Sans"), "DejaVu Sans"]
