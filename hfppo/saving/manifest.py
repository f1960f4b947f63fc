"""The manifest of a checkpoint: its files with their hashes, so that damage shows."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

MANIFEST = "manifest.json"


def seal(folder: Path, known: Mapping[str, str] | None = None) -> None:
    """Flush a folder's files to disk, and list them with their hashes in its manifest.

    Args:
        known: hashes of files that other processes have flushed, by their names in the folder.
    """
    (folder / MANIFEST).unlink(missing_ok=True)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    hashes = dict(known or {})
    hashes |= hash_flushed(folder, [path for path in files if str(path.relative_to(folder)) not in hashes])
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
    flush(folder / MANIFEST)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        flush(path)


def hash_flushed(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Flush files to disk, and return their hashes by their names in the folder."""
    hashes = {}
    for path in files:
        flush(path)
        hashes[str(path.relative_to(folder))] = hash_file(path)
    return hashes


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Force a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_damage(folder: str | Path) -> str | None:
    """Return the first difference between a checkpoint and its manifest, as text; None without a difference."""
    folder = Path(folder)
    if not folder.is_dir():
        return "is not a folder"
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        hashes = None
    if not isinstance(hashes, dict) or not hashes:
        return f"has no readable {MANIFEST}: the run was killed while it was written, or another program wrote it"
    for name, wanted in hashes.items():
        try:
            if hash_file(folder / name) != wanted:
                return f"has a changed {name}"
        except OSError:
            return f"lacks a readable {name}"
    return None
