"""Parsing of command lines: errors in one sentence with a suggestion, and the types of numbers."""

import argparse
import difflib
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from egru.cli.exit_codes import ExitCode


class UsageError(Exception):
    """The command line is not valid."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one sentence. Options cannot be abbreviated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit."""
        print(f"egru: {message.removeprefix('argument ')}; see `{self.prog} --help`", file=sys.stderr)
        sys.exit(ExitCode.USAGE_OR_MISSING_FILE)

    def parse_all(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parse all arguments; a wrong option is reported with similar ones."""
        options, extra = self.parse_known_args(arguments)
        self.refuse(extra)
        return options

    def refuse(self, extra: Sequence[str]) -> None:
        """Report ``extra``, the arguments that were not recognised, if there are any."""
        if extra:
            self.error(unknown_arguments(extra, self.option_names()))

    def option_names(self) -> list[str]:
        """Return the options that this parser accepts."""
        return list(self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Report a value that is not among the choices of ``action``, with the most similar one."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        hint = suggestion(str(value), choices) or f", choose from {', '.join(choices)}"
        if action.option_strings:
            raise argparse.ArgumentError(action, f"unknown value {str(value)!r}{hint}")
        raise argparse.ArgumentError(None, f"unknown {str(action.metavar or action.dest).lower()} {str(value)!r}{hint}")


def unknown_arguments(extra: Sequence[str], known: Iterable[str]) -> str:
    """Return the message for arguments that were not recognised. ``known`` are the accepted options."""
    first = next((argument for argument in extra if argument.startswith("-")), None)
    if first is None:
        return f"unexpected argument {extra[0]!r}"
    name = first.partition("=")[0]
    return f"unknown option {name}{suggestion(name, known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" with the name that is most similar to ``name``, or an empty string."""
    similar = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def positive_int(text: str) -> int:
    """Convert an option to a positive int."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive int, got {text!r}")
    return value


def positive_float(text: str) -> float:
    """Convert an option to a positive, finite float."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return value


def non_negative_float(text: str) -> float:
    """Convert an option to a finite float that is not negative."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a non-negative number, got {text!r}")
    return value


def finite_float(text: str) -> float:
    """Convert an option to a finite float."""
    value = _float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def fraction(text: str) -> float:
    """Convert an option to a float from 0 to 1."""
    value = _float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
