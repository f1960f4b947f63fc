"""One run at a time in an output folder."""

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

PATIENCE = 120.0  # seconds; NFSv4 keeps the lock of a machine that died for about 90
LOCK = "_running"  # Trainer pushes no file whose name begins with "_"


class OutputLock:
    """A POSIX advisory lock on an output folder, taken by one process of a run.

    The OS releases it when the process dies; child processes do not inherit it; it is released early if this process
    opens and closes the file elsewhere. Nothing is locked on Windows, in read-only folders and on file systems without
    locks.
    """

    def __init__(self, output_dir: str | Path):
        self._path = Path(output_dir) / LOCK
        self._descriptor: int | None = None

    def wait(self) -> str | None:
        """Take the lock as `acquire` does; that of another machine, which may have died, is waited for."""
        end, own = time.monotonic() + PATIENCE, f" on {socket.gethostname()}"
        while (other := self.acquire()) is not None and not other.endswith(own) and time.monotonic() < end:
            time.sleep(1.0)
        return other

    def acquire(self, again: bool = True) -> str | None:
        """Take the lock. Return None, or the id and host of the process that has it already.

        Args:
            again: try a second time if the run before removes the file meanwhile.
        """
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
        if again and os.fstat(descriptor).st_nlink == 0:  # removed since it was opened: another run may lock a new one
            os.close(descriptor)
            return self.acquire(again=False)
        self._descriptor = descriptor
        with suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        return None

    def release(self) -> None:
        """Release the lock, if it was taken."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
