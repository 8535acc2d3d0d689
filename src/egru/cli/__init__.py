"""The ``egru`` command: errors and exit codes. The options are in ``parser.py``, the commands in ``commands.py``.

These modules import torch only when a command needs it: `egru --help` and usage errors are immediate.
"""

import argparse
import os
import sys
import traceback

from egru.cli.arguments import UsageError
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
    options = argparse.Namespace(verbose=False, interrupted="run the command again")
    try:
        parser = make_parser()
        options, options.extra = parser.parse_known_args(arguments, options)
        if options.command is None:
            parser.refuse(options.extra)
            parser.error("a COMMAND is required")
        if not options.takes_extra:
            options.parser.refuse(options.extra)
        return options.run(options)
    except KeyboardInterrupt:
        print(f"egru: stopped; {options.interrupted}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        raise
    except UsageError as error:
        print(f"egru: {error}", file=sys.stderr)
        return ExitCode.USAGE_OR_MISSING_FILE
    except Exception as error:
        return _report(error, options.verbose)


def _report(error: Exception, verbose: bool) -> int:
    """Print an error and return the exit code."""
    training = sys.modules.get("egru.training")  # not imported here: torch may be what failed
    paused = training is not None and isinstance(error, training.Paused)
    if verbose and not paused:
        traceback.print_exception(error)
    else:
        print(f"egru: {_message(error)}", file=sys.stderr)
    if paused:
        return ExitCode.PAUSED
    missing_or_taken = isinstance(error, FileNotFoundError | FileExistsError)
    return ExitCode.USAGE_OR_MISSING_FILE if missing_or_taken else ExitCode.FAILED


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    if isinstance(error, ImportError | OSError | RuntimeError | TypeError | ValueError):
        return message
    if isinstance(error, ArithmeticError | LookupError):  # not raised on purpose
        return f"{type(error).__name__}: {message}; a file of the run may be damaged, see --verbose"
    return f"unexpected {type(error).__name__}: {message}; --verbose shows where"
