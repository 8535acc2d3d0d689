"""The ``egru`` command: errors and exit codes. The options are in ``parser.py``, the commands in ``commands.py``."""

import argparse
import os
import sys
import traceback

from egru.cli.commands import UsageError
from egru.cli.exit_codes import ExitCode
from egru.cli.parser import SWEEP_EXAMPLE, make_parser

__all__ = ["SWEEP_EXAMPLE", "ExitCode", "main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the ``egru`` command. Errors are reported in one line; ``--verbose`` adds the traceback.

    Args:
        arguments: The command line. If None, that of the process.

    Returns:
        The exit code, one of :class:`ExitCode`.
    """
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # a closed pipe shows here, not when Python exits
    except BrokenPipeError:  # as in `egru list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still buffered
        return ExitCode.CLOSED_PIPE


def _run(arguments: list[str] | None) -> int:
    parser = make_parser()
    options, extra = parser.parse_known_args(arguments)
    if extra and not options.takes_extra:
        parser.error(f"{options.command}: unrecognized arguments: {' '.join(extra)}")
    options.extra = extra
    try:
        return options.run(options)
    except KeyboardInterrupt:
        hint = "; `egru train --resume RUN` continues from the last checkpoint" if options.command == "train" else ""
        print(f"egru: stopped{hint}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageError as error:
        print(f"egru: {error}", file=sys.stderr)
        return ExitCode.USAGE_OR_MISSING_FILE
    except (ArithmeticError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        return _report(error, options)


def _report(error: Exception, options: argparse.Namespace) -> int:
    from egru.training import Paused

    message = " ".join(str(error).split())
    if isinstance(error, ArithmeticError | LookupError):  # not raised on purpose
        message = f"{type(error).__name__}: {message}; a file of the run may be damaged, see --verbose"
    if options.verbose and not isinstance(error, Paused):
        traceback.print_exception(error)
    else:
        print(f"egru: {message}", file=sys.stderr)
    if isinstance(error, Paused):
        return ExitCode.PAUSED
    return ExitCode.USAGE_OR_MISSING_FILE if isinstance(error, FileNotFoundError) else ExitCode.FAILED
