"""The exit codes of the ``egru`` command."""

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
    ExitCode.USAGE_OR_MISSING_FILE: "the options are not valid, or data or a file is missing",
    ExitCode.PAUSED: "stopped after --minutes; the run can be resumed",
    ExitCode.INTERRUPTED: "interrupted with Ctrl-C",
    ExitCode.CLOSED_PIPE: "the reader of the output closed the pipe, as in `egru list | head`",
}
