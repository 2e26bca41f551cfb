"""How every command writes and ends: `python -m overlap …` and `python -m benchmarks…`.

Here alone is decided what happens to characters that the output cannot show, to a reader that has gone (`| head`), to
Ctrl-C and to a disk that is full. No case has a traceback.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable

from overlap.cli.arguments import WrongArguments

# What stands for a character where the output has none: of ASCII, and one that no JSON text takes amiss.
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
    """Calls `main` and returns its exit status; 130 after Ctrl-C, 1 where the output cannot be written.

    A SystemExit passes through: so do argparse's errors, and one-line refusals.
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
        # Whoever read the output has enough.
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
        if stream is None:  # It was closed (`>&-`).
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
    """Python writes what is left when it ends, and complains where it cannot."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    """Whichever stream cannot be written goes to nowhere from here on."""
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
