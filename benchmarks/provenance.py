"""Finds the commit whose code a benchmark measures. Code that is not committed is not measured.

A measurement can be repeated only if its code can be found again. So the harness refuses a tree that differs from the
commit that it would record. In a copy of the tree without the history, the user names the commit. The harness records
it as unverified, with a hash of the copy's overlap/, computed as Git does. A test compares this hash with the commit's.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
VARIABLE = "OVERLAP_COMMIT"
UNVERIFIED = "unverified: not in a repository here"
DIGITS = 12
# The folders that must not differ from the commit. Results may differ, since each measurement writes some.
_CODE = ("overlap", "benchmarks", ":(exclude)benchmarks/results")


class Refused(Exception):
    """Raised if the code to be measured is not the code of a commit."""


def facts(named: str | None = None, root: pathlib.Path = REPOSITORY) -> dict[str, str]:
    """Returns the commit whose code is in `root`, and the hash of overlap/, by the names "commit" and "code".

    `named` is a full or abbreviated hash; None: $OVERLAP_COMMIT, else HEAD.

    Raises:
      Refused: `named` is no commit of the history, the code differs from it, or there is no .git and `named` is None.
    """
    named = named or os.environ.get(VARIABLE) or None
    code = f"overlap {tree_hash(root / 'overlap')[:DIGITS]}"
    unverified = {"commit": f"{(named or '')[:DIGITS]} ({UNVERIFIED})", "code": code}
    if not has_history(root):
        if named is None:
            words = f"there is no .git in {root}, so the commit must be named: --commit HASH (or {VARIABLE})"
            raise Refused(f"{words}, as `git rev-parse HEAD` says where the tree was copied from")
        if re.fullmatch(r"[0-9a-f]{7,40}", named) is None:
            raise Refused(f"`--commit` must be a hash of 7 to 40 digits where there is no .git, got {named!r}")
        return unverified
    commit = in_history(named or "HEAD", root)
    if commit is None and named and re.fullmatch(r"[0-9a-f]{40}", named) and git(root, "cat-file", "-t", named) is None:
        return unverified  # This tree is a copy inside another repository, which does not have the named commit.
    if commit is None:
        raise Refused(f"`--commit` must be a commit of this repository's history, got {named!r}")
    if changed := _changed(commit, root):
        listed = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise Refused(f"the code differs from commit {commit[:DIGITS]} in {listed}: commit that first, then measure")
    return {"commit": commit[:DIGITS], "code": code}


def has_history(root: pathlib.Path = REPOSITORY) -> bool:
    """Returns whether `root` is the root of a Git repository and the command git is installed."""
    top = git(root, "rev-parse", "--show-toplevel")
    return top is not None and pathlib.Path(top).resolve() == root.resolve()


def in_history(name: str, root: pathlib.Path = REPOSITORY) -> str | None:
    """Returns the full hash of the commit `name` if that is HEAD or an ancestor of HEAD; else None."""
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return commit if commit and git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None else None


def _changed(commit: str, root: pathlib.Path) -> list[str]:
    differing = git(root, "diff", "--name-only", commit, "--", *_CODE)
    new = git(root, "ls-files", "--others", "--exclude-standard", "--", *_CODE)
    if differing is None or new is None:
        raise Refused(f"git cannot compare the code in {root} with commit {commit[:DIGITS]}")
    return sorted({*differing.splitlines(), *new.splitlines()})


def git(root: pathlib.Path, *arguments: str) -> str | None:
    """Runs a git command in `root`. Returns its output; None if the command fails or git is not installed."""
    line = ["git", "-c", f"safe.directory={root}", *arguments]
    try:
        done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def tree_hash(folder: pathlib.Path) -> str:
    """Computes the hash that Git gives this folder (`git rev-parse COMMIT:FOLDER`). Python's caches are left out."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        # Git sorts folders as if their names ended in a slash.
        if path.is_dir():
            entries.append((path.name.encode() + b"/", b"40000", tree_hash(path)))
        else:
            mode = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            entries.append((path.name.encode(), mode, _object_hash(b"blob", path.read_bytes())))
    listed = (mode + b" " + name.rstrip(b"/") + b"\0" + bytes.fromhex(digest) for name, mode, digest in sorted(entries))
    return _object_hash(b"tree", b"".join(listed))


def _object_hash(kind: bytes, data: bytes) -> str:
    return hashlib.sha1(kind + b" " + str(len(data)).encode() + b"\0" + data, usedforsecurity=False).hexdigest()
