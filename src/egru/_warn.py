"""Warnings that point to the user's line."""

import sys
import warnings

_PACKAGES = ("egru", "torch")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's call: the innermost line outside egru and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
