"""Access to the files of tables. Reading never waits; a file is replaced in one step, by one process at a time.

A process that changes a table holds a lock from before it reads the file until it has replaced it. Readers take no
lock: they see the file before or after the change.

The lock is `flock` on a file beside the table, which is removed afterwards. If a killed process leaves that file
behind, it locks nothing. Over NFS, Linux (2.6.12 and later) turns `flock` into a lock on the server, which other hosts
see. The exception is a volume that is mounted with `local_lock=flock` or `nolock`: there, two hosts that write within
the same milliseconds can lose the result of one of them, but never the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import stat
import tempfile
import time
from collections.abc import Iterator

_RETRY_S = 0.02
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
# Other users may read the file, since tables can be shared. (Files of `mkstemp` are for their owner only.)
_NEW_FILE_MODE = 0o644
logger = logging.getLogger("overlap")


def read_text(path: pathlib.Path, most_bytes: int) -> str:
    """The text of a regular file. Nothing else is opened: reading a pipe could wait, and a device may have no end.

    Raises:
      ValueError: it is no regular file, larger than `most_bytes`, or not UTF-8.
      OSError: it cannot be read.
    """
    status = path.stat()
    if kind := _other_kind(status.st_mode):
        raise ValueError(f"it is {kind}")
    if status.st_size > most_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes, and a table at most {most_bytes:,}")
    return path.read_text(encoding="utf-8")


def obstacle(path: pathlib.Path) -> str | None:
    """Why a file cannot be written; None if it can.

    This function takes the lock and writes a temporary file, as a later write will. So it finds missing rights, a full
    disk and a lock of another process. It leaves nothing behind.
    """
    path = target_of(path)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if kind := _other_kind(path.stat().st_mode):
                return f"it is {kind}"
            if not os.access(path, os.W_OK):
                return "it is write-protected"
        if not path.parent.is_dir():
            return f"{path.parent} is {'no folder' if path.parent.exists() else 'a folder that does not exist'}"
        with locked(path), tempfile.TemporaryFile(dir=path.parent) as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"{error.strerror or error} ({path.parent})"
    return None


@contextlib.contextmanager
def locked(path: pathlib.Path, wait_s: float = 60.0) -> Iterator[None]:
    """A context in which no other process changes the file `path`. The file need not exist, but its folder must.

    On a file system without locks a warning is logged, and no lock is taken.

    Raises:
      TimeoutError: another process has had the lock for `wait_s` seconds.
      OSError: no file can be made beside `path`.
    """
    path = target_of(path)
    lock = path.with_name(f".{path.name}.lock")
    handle = _acquire(lock, wait_s)
    try:
        yield
    finally:
        # Remove the file before the lock is released. A process that then gets the lock sees that the file is gone, and
        # makes a new one (`_acquire`).
        with contextlib.suppress(OSError):
            os.unlink(lock)
        os.close(handle)


def _acquire(lock: pathlib.Path, wait_s: float) -> int:
    end = time.monotonic() + wait_s
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            # The file belongs to another user. A lock does not need the right to write.
            handle = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If not, the process that held the lock has removed the file between the two lines above.
            if os.stat(lock).st_ino == os.fstat(handle).st_ino:
                return handle
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                logger.warning("%s has no locks (%s): two tunings at once may lose results", lock.parent, error)
                return handle
            os.close(handle)
            raise
        os.close(handle)
        if time.monotonic() > end:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process has held the lock {lock} for {wait_s:g} s: end it (fuser {lock})"
            )
        time.sleep(_RETRY_S)


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file in one atomic step, and makes its folder if need be. If `path` is a link, its target is replaced.

    Raises:
      OSError: it cannot be written, or is no regular file. The old file is then left as it is.
    """
    path = target_of(path)
    mode = _NEW_FILE_MODE
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        if kind := _other_kind(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, no file", str(path))
        mode = stat.S_IMODE(status.st_mode)  # Keep the rights of the old file.
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def target_of(path: pathlib.Path) -> pathlib.Path:
    """The file itself, if `path` is a link or has links on its way."""
    return pathlib.Path(os.path.realpath(path))


def _other_kind(mode: int) -> str:
    """What kind of file this is, in words; "" if it is a regular one."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")
