"""One run at a time in an output folder."""

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

LOCK = "_running"  # Trainer leaves what begins with "_" out of what it pushes


class OutputLock:
    """A lock on an output folder, for one process of a run.

    It is POSIX's, which the system takes back when the process ends, however it ends, and which its children do not
    inherit; it takes it back as well when the process opens and closes the file elsewhere. Where the file system has
    none, on Windows and in folders that cannot be written to nothing is locked.
    """

    def __init__(self, output_dir: str | Path):
        self._path = Path(output_dir) / LOCK
        self._descriptor: int | None = None

    def acquire(self) -> str | None:
        """Take the lock; the other process, by number and host, if one has it."""
        if sys.platform == "win32":
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            return owner if isinstance(error, BlockingIOError | PermissionError) else None
        if not self._still_names(descriptor):  # another run ended, and deleted it, in between
            os.close(descriptor)
            return self.acquire()
        self._descriptor = descriptor
        with suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return None

    def _still_names(self, descriptor: int) -> bool:
        """Whether an open file is still the one of that name."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        return False

    def release(self) -> None:
        """Give the lock back, if it was taken."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
