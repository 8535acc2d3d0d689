"""Colours and matplotlib settings of figures on light and dark backgrounds.

Event-based models take colours from the palette of Okabe and Ito, which is safe for colour-blind readers. Dense models
are grey.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from egru.report.run import RunReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of figures on one background.

    Attributes:
        name: "light" or "dark".
        background: Colour behind the figure; "none" for a transparent figure.
        ink: Colour of text.
        muted: Colour of axis labels and other secondary text.
        faint: Colour of axes and grid lines.
        dense: Colour of dense models.
        event: Colours of event-based models, used in turn.
        alarm: Colour of warnings, such as units that are never active.
        value_colours: Colours of event values from near zero to the largest. All contrast with the background.
        image_colours: Name of the matplotlib colour map for input images.

    Example:
        >>> import matplotlib.pyplot as plt
        >>> with egru.report.LIGHT.context():
        ...     figure, axes = plt.subplots()
    """

    name: str
    background: str
    ink: str
    muted: str
    faint: str
    dense: str
    event: tuple[str, ...]
    alarm: str
    value_colours: tuple[str, ...]
    image_colours: str

    def context(self) -> AbstractContextManager[None]:
        """Return a context manager in which matplotlib draws figures in this theme.

        Raises:
            ImportError: If matplotlib is not installed.
        """
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
        """Return one colour per run: grey for dense models, a colour of :attr:`event` for the others."""
        hues = iter(self.event * (1 + len(runs) // len(self.event)))
        return [next(hues) if run.event_layers else self.dense for run in runs]

    def value_map(self, both_signs: bool) -> "Colormap":
        """Return a colour map of event values: one ramp from zero or, if ``both_signs``, two that meet at zero."""
        require_matplotlib()
        from matplotlib.colors import LinearSegmentedColormap

        ramp = self.value_colours
        if both_signs:
            ramp = (self.alarm, self.faint, ramp[-1])
        return LinearSegmentedColormap.from_list(f"egru-{self.name}", list(ramp))

    def grid(self, axes: "Axes", which: Literal["x", "y", "both"] = "y") -> None:
        """Draw faint grid lines behind the data."""
        axes.set_axisbelow(True)
        axes.grid(True, axis=which, color=self.faint, linewidth=0.6, alpha=0.55)
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
    """Return the module matplotlib; the ImportError names the package to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures require matplotlib: pip install 'egru[demo]'") from error
    return matplotlib


def _fonts() -> list[str]:
    """Return the first installed font of the page's style sheet, then matplotlib's default, which has every glyph."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    preferred = ("Inter", "Helvetica Neue", "Segoe UI", "Arial", "Liberation Sans")
    return [next((name for name in preferred if name in installed), "DejaVu Sans"), "DejaVu Sans"]
