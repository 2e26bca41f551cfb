"""Runs a command, `python -m overlap …` or `python -m benchmarks…`, so that it ends without a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from overlap.cli.arguments import WrongArguments


def run(main: Callable[[], int]) -> int:
    """Calls `main`, and returns the exit status of the command.

    Returns:
      The exit status of `main`; 2 after `WrongArguments`, 130 after Ctrl-C, 1 if a file cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # Not every terminal can show "µ" and "→".
    try:
        status = main()
        print(end="", flush=True)
        return status
    except WrongArguments as reason:
        print(reason, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of the pipe has left, as `| head` does. Else Python would report that once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"{error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return 1
