"""Runs a command, `python -m overlap …` or `python -m benchmarks…`, so that it ends without a traceback.

It handles characters that the output's encoding lacks, a reader that has closed the pipe (`| head`), Ctrl-C and a full
disk.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable

from overlap.cli.arguments import WrongArguments

# What replaces a character that the output's encoding lacks. All are ASCII, and none needs quoting in JSON.
_PLAIN = {
    "×": "x",
    "→": "->",
    "…": "...",
    "–": "-",
    "—": "-",
    "µ": "u",
    "“": "'",
    "”": "'",
    "≥": ">=",
    "≤": "<=",
    "━": "-",
    "─": "-",
    "│": "|",
    "·": ".",
}
_HANDLER = "overlap.plain"


def run(main: Callable[[], int]) -> int:
    """Calls `main`, and returns the exit status of the command.

    A SystemExit passes through, for example from argparse.

    Returns:
      The exit status of `main`; 2 after `WrongArguments`, 130 after Ctrl-C, 1 if the output cannot be written.
    """
    _prepare_streams()
    try:
        status = main()
        sys.stdout.flush()
        sys.stderr.flush()
        return status
    except WrongArguments as reason:
        _say(str(reason))
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        # The reader of the pipe has closed it.
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        _say(f"{error.filename or 'the output'}: {error.strerror or error}")
        return 1
    finally:
        _flush_or_drop()


def _prepare_streams() -> None:
    codecs.register_error(_HANDLER, _plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # The shell has closed this stream (`>&-`).
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  For the rest of the process.
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop_output()


def _flush_or_drop() -> None:
    """Flushes both streams. Otherwise Python does that when it ends, and prints an error if it cannot."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    """Redirects each stream that cannot be written to the null device."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
            except (OSError, ValueError):
                continue
