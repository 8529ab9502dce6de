"""Curves as pictures, if matplotlib is installed (extra `plots`).

The same curves give the same bytes in an SVG file: no dates, no random names in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvcache.base.errors import ConfigurationError

_ENDS = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Curve:
    """A line with a name. `is_bound`: it is what others are measured against."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_bound: bool = False


def require_plots(path: Path) -> None:
    """Raise ConfigurationError if nothing can be drawn to `path`."""
    if path.suffix not in _ENDS:
        raise ConfigurationError(
            f"--plot {path}: pictures end with {', '.join(_ENDS[:-1])} or {_ENDS[-1]}: choose one"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no directory {path.parent}: make it")
    if find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: pip install 'kvcache[plots]'"
        )


def draw_curves(
    path: Path, curves: Sequence[Curve], *, title: str, x_name: str, y_name: str
) -> None:
    """Draw all curves over a logarithmic x axis; raises ConfigurationError if that fails."""
    require_plots(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, PercentFormatter

    with matplotlib.rc_context({"svg.hashsalt": "kvcache", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
        for curve in curves:
            xs, ys = zip(*curve.points, strict=True)
            form = "k--" if curve.is_bound else "o-"
            axes.plot(xs, ys, form, label=curve.name, linewidth=1.4, markersize=3.5)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        numbers = FuncFormatter(lambda x, _: f"{x:,.10g}")
        axes.xaxis.set_major_formatter(numbers)
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter(numbers)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        axes.set_title(title)
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        try:
            figure.savefig(path, metadata=metadata, dpi=150)
        except OSError as error:
            raise ConfigurationError(
                f"--plot {path}: cannot be written ({error.strerror or error}): name another file"
            ) from error
        finally:
            pyplot.close(figure)
