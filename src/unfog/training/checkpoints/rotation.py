"""Replacement and removal of checkpoints: at least one whole checkpoint is left after a crash."""

from __future__ import annotations

import os
from pathlib import Path

from unfog.files.safe_files import discard, move, remove_tree
from unfog.training.checkpoints.format import BrokenCheckpoint, best_of, is_broken, list_checkpoints, run_of
from unfog.training.settings import Checkpoint


def remove_old_checkpoints(checkpoints: Path, keep: Checkpoint) -> None:
    """Remove all checkpoints but the newest `keep.keep`, the milestones, the best one and two rollback checkpoints.

    Broken ones count here by their manifests; `remove_leftovers` sets them aside when a run is resumed.
    """
    saved, _ = list_checkpoints(checkpoints)
    # The newest stays even if it was saved for its metric alone, as a resume begins there.
    wanted = {old.step for old in [old for old in saved if not old.for_best][-keep.keep :] + saved[-1:]}
    wanted |= {old.step for old in saved if keep.milestones and old.step % keep.milestones == 0}
    # Two, as a run that diverges again soon after a roll-back returns to the one before.
    wanted |= {old.step for old in [old for old in saved if old.anchor][-2:]}
    if (best := best_of(saved)) is not None:
        wanted.add(best.step)
    for old in saved:
        if old.step not in wanted:
            remove_checkpoint(old.folder)


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint by renaming it first, so that it is whole or gone under its name."""
    aside = folder.with_name(f".old-{folder.name}")
    remove_tree(aside, run_of(aside))
    discard(folder, aside, run_of(folder))


def replace_checkpoint(written: Path, folder: Path) -> None:
    """Move a checkpoint to its place, then remove an older one of the same step."""
    if not os.path.lexists(folder):
        move(written, folder, run_of(folder))
        return
    # The old one goes only once the new one is in place; `restore_replaced` undoes a crash between the two renames.
    aside = folder.with_name(f".replaced-{folder.name}")
    remove_tree(aside, run_of(aside))
    move(folder, aside, run_of(folder))
    move(written, folder, run_of(folder))
    remove_checkpoint(aside)


def restore_replaced(checkpoints: Path) -> None:
    """Undo a `replace_checkpoint` that was interrupted before the new one was in place, or that put a broken one."""
    for aside in checkpoints.glob(".replaced-*"):
        folder = aside.with_name(aside.name.removeprefix(".replaced-"))
        if os.path.lexists(folder) and is_broken(folder):
            _set_aside(folder)
        if not os.path.lexists(folder):
            move(aside, folder, run_of(folder))


def _set_aside(folder: Path) -> None:
    """Hide a broken checkpoint, and leave those of the same step that were hidden before: nothing is deleted."""
    aside, number = folder.with_name(f".broken-{folder.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f".broken-{folder.name}-{number}")
    move(folder, aside, run_of(folder))


def remove_leftovers(checkpoints: Path, broken: list[BrokenCheckpoint]) -> None:
    """Remove what a crash left half done, and hide broken checkpoints, so that they are not counted."""
    for folder in checkpoints.glob(".[por]*"):
        if folder.name.startswith((".partial-", ".old-", ".replaced-")):
            remove_tree(folder, run_of(folder))
    for folder in (one.folder for one in broken if not one.unreadable):
        _set_aside(folder)
