"""Raise if the processes of a run do not find each other's files in the output folder."""

import socket
import time
from pathlib import Path
from uuid import uuid4

from accelerate.utils import gather_object

PATIENCE = 60.0  # seconds until a machine sees the new file of another one; NFS may show a folder as it was before


def check_shared(folder: str | Path, saves: bool) -> None:
    """Raise unless each process sees the files of exactly one process that saves; a collective call.

    Args:
        folder: the output folder of this process.
        saves: whether this process writes the model: process 0, or with `save_on_each_node` one of each machine.
    Raises:
        ValueError: on all processes; names both machines.
    """
    token = Path(folder) / f"_{uuid4().hex}"
    if saves:
        token.touch()
    each = gather_object([(socket.gethostname(), str(folder), token.name if saves else None)])
    savers = [(host, path, name) for host, path, name in each if name is not None]
    end = time.monotonic() + PATIENCE
    while not (seen := [saver for saver in savers if token.with_name(saver[2]).exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    found = gather_object([seen])  # before the files are removed
    token.unlink(missing_ok=True)
    for process, ((host, path, _), seen) in enumerate(zip(each, found, strict=True)):
        saver, where, _ = (seen or savers)[-1]
        subject = f"output_dir={path!r} of process {process} on {host}"
        if not seen:
            raise ValueError(
                f"{subject} is another folder than {where!r} of process 0 on {saver}, and no checkpoint would be "
                "whole; put it on a file system that all machines share, or set save_on_each_node=True"
            )
        if len(seen) > 1:
            raise ValueError(
                f"{subject} is also that of a process on {saver}, and with save_on_each_node=True each would remove "
                "the other's files; leave save_on_each_node out, or give each machine a folder of its own"
            )
