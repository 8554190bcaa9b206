"""Pack images: decode and resize them once, into a folder that needs no preparation before training."""

from __future__ import annotations

import time
from pathlib import Path

from unfog.config.requests.pack import PackRequest
from unfog.data.cache import entry_key
from unfog.data.packs.pack import Pack
from unfog.data.packs.pack_writer import Journal, remove_work_files, write_pack
from unfog.data.prepare import scan_source, silence_pillow
from unfog.data.scan import Scan
from unfog.data.settings import TRAINING_ONLY, Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.process.run_folder import printable
from unfog.process.signals import StopSignals
from unfog.reporting.progress import Progress, format_duration, say, warn
from unfog.settings import AUTO, is_auto
from unfog.text import format_bytes, plural
from unfog.values.columns import columns_digest


def pack(request: PackRequest) -> Path:
    """Pack the images, and return the folder. The same call continues after a signal, a kill or a full disk."""
    data, out, usual = request.data, request.out, Data()
    if data.aspect != usual.aspect:
        raise RequestError(
            "data.aspect acts during training, and the images of a pack have one size; give the images themselves to "
            "unfog train --aspect keep, whose cache holds them decoded"
        )
    for name in TRAINING_ONLY:
        if getattr(data, name) != getattr(usual, name):
            raise RequestError(
                f"data.{name} acts during training, and a pack stores images without it; give it to unfog train"
            )
    # Around the indexing too: the headers of remote shards take minutes.
    with StopSignals() as stop:
        with Progress("indexing (MB)", None) as progress:
            source = open_source(request.source, stop.watching(progress), axes=data.axes, slices=data.slices)
        scan, _ = scan_source(source, data)
        for left_out in scan.warnings:
            warn(left_out)
        if Pack.is_at(out):
            check_same_pack(Pack.open(out), scan)
            remove_work_files(out)
            say(f"{printable(str(out))} is already complete, with these images and settings")
            return out
        with silence_pillow(), Progress("packing", len(source.names)) as progress:
            known = scan.warnings
            scan = scan.resolve().with_second(stop.watching(progress))
            key = entry_key(scan, scan.settings)
            begun = packed_before(out, scan, key)
            started = time.monotonic()
            try:
                made = write_pack(scan, out, key, "give another folder", stop.watching(progress))
            # Interrupted is one too. What was written counts, which a person who stops should know before deleting it.
            except KeyboardInterrupt:
                done = Journal.read(out).done
                if done:
                    say(f"{done:,} of {len(source.names):,} images are saved; repeat the command to continue")
                raise
        for left_out in scan.warnings[len(known) :]:
            warn(left_out)
        _report_pack(made, scan, begun, time.monotonic() - started, size_was_open=is_auto(data, "size"))
    return out


def check_same_pack(found: Pack, scan: Scan) -> None:
    """Raise `RequestError` unless the pack that is there has these images and settings."""
    asked, kept = scan.settings, found.settings
    same = found.manifest["stamp"] == scan.stamp
    # 0 leaves a size open, which the finished pack has settled.
    same = same and all(getattr(asked, name) in (0, kept[name]) for name in ("size", "channels"))
    same = same and asked.range in ((), kept["range"]) and asked.clip == kept["clip"]
    same = same and (asked.axes, asked.slices) == (kept["axes"], kept["slices"])
    same = same and (asked.requested_dtype or asked.dtype) in (AUTO, kept["dtype"])
    same = same and (asked.background, asked.held_out) == (kept["background"], kept["held_out"])
    same = same and columns_digest(scan.columns) == found.manifest.get("columns_digest", "")
    same = same and (scan.labels is None) == (kept["labels"] == "none")
    if not same:
        raise RequestError(
            f"{printable(str(found.path))} is already a pack of {printable(found.report.source)}, with other "
            "images or settings; give another folder, or remove it"
        )


def packed_before(out: Path, scan: Scan, key: str) -> int:
    """Return the number of images that an interrupted call has packed.

    RequestError if they are other images or settings, and are not to be overwritten unasked.
    """
    found = Journal.read(out)
    if not found.done:
        return 0
    differs = found.difference(scan, key)
    if differs:
        raise RequestError(
            f"{printable(str(out))} is an unfinished pack, {found.done:,} images of which are done, and was begun with "
            f"{differs} in another state; remove it to begin anew, or give another folder"
        )
    say(f"continuing at image {found.done:,} of {len(scan.source.names):,}")
    return found.done


def _report_pack(made: Pack, scan: Scan, begun: int, seconds: float, size_was_open: bool) -> None:
    n = len(made.images)
    pace = (len(scan.source.names) - begun) / max(seconds, 1e-9)
    say(made.report.line())
    if size_was_open and (chosen := made.report.chosen_size_line()):
        say(f"  {chosen}")
    say(
        f"packed {plural(n)} of {made.report.image_format} into {printable(str(made.path))}: "
        f"{format_bytes(made.nbytes)} in {format_duration(seconds)}, {pace:,.0f} images/s"
    )
    # A pack of images from before and after a change is of neither set, and nothing in it shows that.
    if scan.read_stamp() != scan.stamp:
        warn("images were changed while they were packed; remove the pack and repeat the command")
