"""Reads and replaces the files of tables. Reading never waits. One process at a time replaces a file, in one step.

A process that changes a table holds a lock from before it reads the file until it has replaced it. Readers take no
lock: they see the file before or after the change.

The lock is `flock` on a lock file in the table's folder; the lock file is removed afterwards. If a process is killed
and leaves its lock file behind, that file does not lock anything. Over NFS, Linux (2.6.12 and later) turns `flock` into
a lock on the server, which other hosts see. The exception is a volume that is mounted with `local_lock=flock` or
`nolock`. If two hosts write there within the same milliseconds, the results of one of them may be lost, but the file
stays valid.
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
# Let other users read the file, since tables can be shared. Without this, a file made by `mkstemp` is readable for its
# owner only.
_NEW_FILE_MODE = 0o644
logger = logging.getLogger("overlap")


def read_text(path: pathlib.Path, most_bytes: int) -> str:
    """Returns the text of a regular file. Other kinds are not opened: a pipe could block, a device may have no end.

    Raises:
      ValueError: the path is not a regular file, or the file is larger than `most_bytes`, or not UTF-8.
      OSError: the file cannot be read.
    """
    status = path.stat()
    if kind := _other_kind(status.st_mode):
        raise ValueError(f"it is {kind}")
    if status.st_size > most_bytes:
        raise ValueError(f"it has {status.st_size:,} bytes, and a table at most {most_bytes:,}")
    return path.read_text(encoding="utf-8")


def obstacle(path: pathlib.Path) -> str | None:
    """Returns why a file cannot be written; None if it can.

    Like a later write, this function takes the lock and writes a temporary file. So it notices missing rights, a full
    disk, and a lock that another process holds. It removes the files that it makes.
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
    """Opens a context in which no other process changes the file `path`. The file need not exist, but its folder must.

    On a file system without locks, this logs a warning and takes no lock.

    Raises:
      TimeoutError: another process has had the lock for `wait_s` seconds.
      OSError: no file can be made in the folder of `path`.
    """
    path = target_of(path)
    lock = path.with_name(f".{path.name}.lock")
    handle = _acquire(lock, wait_s)
    try:
        yield
    finally:
        # Remove the lock file before the lock is released. A process that waited for this lock then sees that the file
        # is gone, and makes a new lock file (`_acquire`).
        with contextlib.suppress(OSError):
            os.unlink(lock)
        os.close(handle)


def _acquire(lock: pathlib.Path, wait_s: float) -> int:
    end = time.monotonic() + wait_s
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except PermissionError:
            # The lock file belongs to another user. To lock it, the right to read is enough.
            handle = os.open(lock, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the two numbers differ, the process that held the lock has removed the lock file since `os.open` above:
            # try again.
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
    """Writes a file in one atomic step; makes its folder if it does not exist.

    If `path` is a link, the file that it leads to is replaced.

    Raises:
      OSError: the file cannot be written, or `path` is not a regular file. The old file is then left as it is.
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
    """Returns `path` with all symbolic links resolved."""
    return pathlib.Path(os.path.realpath(path))


def _other_kind(mode: int) -> str:
    """Returns in words what kind of file has the mode `mode`; "" for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")
