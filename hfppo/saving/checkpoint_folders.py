"""The checkpoints in an output folder: find, publish, move and delete them."""

import logging
import re
import shutil
from itertools import count
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.saving.manifest import find_damage, flush

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(?P<step>\d+)")
STAGING, EARLIER = "_saving", "_earlier"  # Trainer pushes no file or folder whose name begins with "_"


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of their steps."""
    found = {path: CHECKPOINT.fullmatch(path.name) for path in Path(output_dir).glob("*") if path.is_dir()}
    steps = {path: int(match["step"]) for path, match in found.items() if match}
    return sorted(steps, key=lambda path: steps[path])


def find_last_intact(output_dir: str | Path) -> str | None:
    """Return the latest complete checkpoint, and warn of each damaged one after it; None if there is none."""
    for folder in reversed(list_checkpoints(output_dir)):
        if (damage := find_damage(folder)) is None:
            return str(folder)
        logger.warning("%s is passed over: it %s", folder, damage)
    return None


def finish_renames(output_dir: str | Path) -> None:
    """Finish an interrupted rename: publish a fully written checkpoint left in the staging folder."""
    for staged in list_checkpoints(Path(output_dir) / STAGING):
        final = Path(output_dir) / staged.name
        if find_damage(staged) is None and find_damage(final) is not None:
            publish(staged, final)


def publish(staged: Path, final: Path) -> None:
    """Rename a staged folder to its final name, replacing a folder of that name.

    The old folder is renamed first; `finish_renames` completes what a kill interrupts in between.
    """
    if final.exists():
        before = staged.with_name("before")
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    staged.rename(final)
    flush(final.parent)


def rotate(output_dir: Path, limit: int | None, last: Path, best: str | None) -> None:
    """Delete the checkpoints beyond `save_total_limit`, but never the one just saved nor the best.

    Unlike upstream, the oldest checkpoint has the lowest step: clocks may be set back.
    """
    if limit is None or limit <= 0:
        return
    found = list_checkpoints(output_dir)
    kept = {Path(folder).resolve() for folder in (last, best) if folder is not None}
    others = [folder for folder in found if folder.resolve() not in kept]
    for folder in others[: max(0, len(found) - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def move_others(output_dir: Path, start: Path | None, best: str | None) -> None:
    """Move the checkpoints that a run does not continue from into `_earlier_<n>`, so that none of them is lost.

    The run would overwrite checkpoints of equal steps and delete others for `save_total_limit`. After a kill it would
    resume from the last of the old ones.

    Args:
        start: the checkpoint that the run continues from, resolved; those before it belong to the run.
        best: the run's best checkpoint, which stays where it is.
    """
    found = list_checkpoints(output_dir)
    before = (n for n, folder in enumerate(found, 1) if folder.resolve() == start)
    kept = None if best is None else Path(best).resolve()
    others = [folder for folder in found[next(before, 0) :] if folder.resolve() != kept]
    if not others:
        return
    earlier = next(path for n in count(1) if not (path := output_dir / f"{EARLIER}_{n}").exists())
    earlier.mkdir()
    for folder in reversed(others):  # newest first, so a kill leaves no later checkpoint behind
        folder.rename(earlier / folder.name)
    logger.warning(
        "%s had checkpoints of another run; they were moved to %s, the last one is %s",
        output_dir,
        earlier,
        earlier / others[-1].name,
    )
