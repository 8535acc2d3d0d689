"""The exit codes of the ``egru`` command. This is the only list of them: `egru --help` shows it."""

import enum


class ExitCode(enum.IntEnum):
    """Why the command ended. `egru --help` shows :data:`MEANINGS`."""

    DONE = 0
    FAILED = 1
    USAGE_OR_MISSING_FILE = 2
    PAUSED = 75
    INTERRUPTED = 130
    CLOSED_PIPE = 141


MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed; the message says why",
    ExitCode.USAGE_OR_MISSING_FILE: "the command line is not valid, or names a file, run or data set that is missing",
    ExitCode.PAUSED: "stopped after --minutes; the run can be resumed",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
    ExitCode.CLOSED_PIPE: "the reader of the output closed the pipe, as in `egru list | head`",
}
