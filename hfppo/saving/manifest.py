"""What a checkpoint's folder holds, listed with hashes, so that damage shows."""

import hashlib
import json
import os
from pathlib import Path

MANIFEST = "manifest.json"


def seal(folder: Path) -> None:
    """Flush a folder's files to the disk and list them, with their hashes, in its manifest."""
    (folder / MANIFEST).unlink(missing_ok=True)
    files = {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    for name in files:
        flush(folder / name)
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))
    flush(folder / MANIFEST)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        flush(path)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Have the disk hold what was written to a file or, for a folder, its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint; None if it is as it was written."""
    folder = Path(folder)
    if not folder.is_dir():
        return "is no folder"
    try:
        files = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        files = None
    if not isinstance(files, dict) or not files:
        return f"has no readable {MANIFEST}: the run was killed while it was written, or another program wrote it"
    for name, wanted in files.items():
        if not (folder / name).is_file():
            return f"lacks {name}"
        try:
            found = digest(folder / name)
        except OSError as error:
            return f"has an unreadable {name} ({error})"
        if found != wanted:
            return f"has a changed {name}"
    return None
