"""Export as a run: settings and EMA weights of half precision, for `unfog sample`, `unfog evaluate` and `--init`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.files.safe_files import make_folder
from unfog.inference.exports.diffusers import save_weights
from unfog.inference.loaded_run import LoadedRun
from unfog.process.run_folder import RunFolder, source_name
from unfog.training.checkpoints.format import EMA
from unfog.training.checkpoints.snapshot import write_weights_manifest

_ABSOLUTE = re.compile(r"(?<![\w./-])(?:/|[A-Za-z]:[\\/])(?:[^\s,;=]*[\\/])?")  # folders of an absolute path


def write_small_run(run: LoadedRun, network: nn.Module, sampler: Sampler, folder: Path) -> nn.Module:
    """Write the run into an empty folder, and return the network that is loaded from there.

    `unfog sample` draws with `sampler`. RequestError if the run generates latents, whose autoencoder this format lacks.
    """
    if run.config.representation.scaling():
        raise RequestError(
            "--format run is of pixels, and this run generates latents of an autoencoder; copy the folder of the run, "
            "or give --format safetensors"
        )
    target = RunFolder(folder)
    place = target.checkpoints / f"{run.step:08d}"
    make_folder(target.checkpoints, folder)
    make_folder(place, folder)
    save_weights({name: _half(tensor) for name, tensor in network.state_dict().items()}, place / EMA)
    write_weights_manifest(place, run.checkpoint._replace(step=run.step))
    target.write_config(_handed_on(run.config, sampler))
    return LoadedRun(folder, device="cpu").network


def _half(tensor: Tensor) -> Tensor:
    """Return a tensor in 16 bits, if its values are in their range."""
    half = tensor.half()
    return half if tensor.is_floating_point() and bool(half.isfinite().all()) else tensor


def _handed_on(config: Config, sampler: Sampler) -> Config:
    """Return the settings without places on this machine, and without a guide, whose snapshots are not there."""
    public = config.without_secrets()
    started = source_name(public.init.folder) if public.init.folder else ""
    data = replace(
        public.data,
        labels=_ABSOLUTE.sub("", public.data.labels),
        condition=_ABSOLUTE.sub("", public.data.condition),
        unknown_mask=_ABSOLUTE.sub("", public.data.unknown_mask),
    )
    return replace(
        public,
        source=source_name(public.source),
        data=data,
        init=replace(public.init, folder=started),
        sampler=sampler,
        guide="none",
        log=replace(public.log, sinks=()),
        checkpoint=replace(public.checkpoint, mirror=""),
    )
