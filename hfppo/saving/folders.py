"""The checkpoints in an output folder: which there are, whose they are, and how one gets its name or makes way."""

import json
import logging
import re
import shutil
from itertools import count
from pathlib import Path

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hfppo.saving.manifest import damage, flush

logger = logging.getLogger(__name__)

CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(?P<step>\d+)")
UNFINISHED = "checkpoint-is-incomplete.txt"  # upstream's mark while `enable_jit_checkpoint` saves
ASIDE, EARLIER = "_saving", "_earlier"  # Trainer leaves what begins with "_" out of what it pushes


def checkpoints(output_dir: str | Path) -> list[Path]:
    """The checkpoints in a folder by their steps; other folders may have such a name and something added to it."""
    found = {path: CHECKPOINT.fullmatch(path.name) for path in Path(output_dir).glob("*") if path.is_dir()}
    return sorted((path for path, name in found.items() if name), key=lambda path: int(found[path]["step"]))


def last_intact(output_dir: str | Path) -> str | None:
    """The latest checkpoint that is whole; those passed over are named in a warning. None without any."""
    for folder in reversed(checkpoints(output_dir)):
        if (wrong := damage(folder)) is None:
            return str(folder)
        logger.warning("%s is passed over: it %s", folder, wrong)
    return None


def finish_renames(output_dir: str | Path) -> None:
    """Give a checkpoint its name that was whole when its run was killed, and had not got it yet."""
    for new in checkpoints(Path(output_dir) / ASIDE):
        final = Path(output_dir) / new.name
        if damage(new) is None and damage(final) is not None:
            put_in_place(new, final)


def put_in_place(new: Path, final: Path) -> None:
    """Give a folder its name. What had it goes aside first; `finish_renames` ends what a kill interrupts."""
    if final.exists():
        before = new.with_name("before")
        shutil.rmtree(before, ignore_errors=True)
        final.rename(before)
    new.rename(final)
    flush(final.parent)


def rotate(output_dir: Path, limit: int | None, last: Path, best: str | None) -> None:
    """Delete checkpoints beyond `save_total_limit`, but neither the one that was just saved nor the best.

    As upstream, except that the oldest is the one of the first step: clocks may be set back.
    """
    if limit is None or limit <= 0:
        return
    found = checkpoints(output_dir)
    kept = {Path(folder).resolve() for folder in (last, best) if folder is not None}
    others = [folder for folder in found if folder.resolve() not in kept]
    for folder in others[: max(0, len(found) - limit)]:
        shutil.rmtree(folder, ignore_errors=True)


def set_others_aside(output_dir: Path, start: Path | None, best: str | None) -> None:
    """Move the checkpoints that a run does not go on from into a folder aside, so that none is lost to its own.

    It would write over those of its own steps and delete others for `save_total_limit`; and, killed, it would be
    resumed from the last of them.

    Args:
        start: the checkpoint that the run goes on from, resolved; those before it are its own.
        best: its best one, which stays wherever it is.
    """
    found = checkpoints(output_dir)
    before = (n for n, folder in enumerate(found, 1) if folder.resolve() == start)
    kept = None if best is None else Path(best).resolve()
    others = [f for f in found[next(before, 0) :] if holds_something(f) and f.resolve() != kept]
    if not others:
        return
    earlier = next(path for n in count(1) if not (path := output_dir / f"{EARLIER}_{n}").exists())
    earlier.mkdir()
    for folder in reversed(others):  # so that a kill in between leaves none that is later than one moved
        folder.rename(earlier / folder.name)
    logger.warning(
        "%s held checkpoints that this run does not go on from; they are in %s now, the last as %s",
        output_dir,
        earlier,
        earlier / others[-1].name,
    )


def holds_something(folder: Path) -> bool:
    """Whether it has not just been given its name and a mark, as `enable_jit_checkpoint` does before it saves."""
    return any(path.name != UNFINISHED for path in folder.iterdir())


def was_best_of(state: TrainerState, checkpoint: Path) -> bool:
    """Whether a checkpoint was the best of a run when it was saved: its log begins the run's."""
    try:
        own = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
    except (OSError, ValueError, TypeError):
        return False
    log = state.log_history[: len(own.log_history)]
    # As text, since NaN is not equal to itself.
    return own.best_global_step == own.global_step and json.dumps(own.log_history) == json.dumps(log)


def way_back(output_dir: str | Path) -> str:
    """Where a run that failed goes on, for its error."""
    found = checkpoints(output_dir)
    if not found:
        return "There is no checkpoint yet."
    return f"The last checkpoint is {found[-1]}: go on from it with resume_from_checkpoint=True."


def free_space(folder: Path) -> str:
    """How much room a disk has left, for an error."""
    try:
        return f"its disk has {shutil.disk_usage(folder).free / 2**20:.0f} MiB left"
    except OSError as error:
        return f"its folder is out of reach ({error})"
