"""Export as a run: settings and EMA weights of half precision, for `unfog sample`, `unfog evaluate` and `--init`."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.data.columns.image_setting import split_images
from unfog.data.settings import LABELS, parse_condition, table_and_columns
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.files.safe_files import make_folder
from unfog.inference.exports.diffusers import save_weights
from unfog.inference.loaded_run import LoadedRun, swept_width, weights_digest
from unfog.process.run_folder import RunFolder, source_name
from unfog.text import without_secrets
from unfog.training.checkpoints.format import EMA
from unfog.training.checkpoints.load import load_weights
from unfog.training.checkpoints.snapshot import write_weights_manifest
from unfog.training.settings import Evaluate, PowerEma


def write_small_run(run: LoadedRun, network: nn.Module, sampler: Sampler, folder: Path) -> nn.Module:
    """Write the run into an empty folder, and return the network that is loaded from there.

    `unfog sample` draws with `sampler`. RequestError if the weights are not of an EMA, or the run generates
    latents: this format has neither raw weights nor an autoencoder.
    """
    if run.weights != "ema":
        raise RequestError(
            f"--format run holds EMA weights alone, and --weights {run.weights} was given; omit it, or give "
            "--format safetensors"
        )
    if run.config.representation.scaling():
        raise RequestError(
            "--format run is of pixels, and this run generates latents of an autoencoder; copy the folder of the run, "
            "or give --format safetensors"
        )
    settings, checkpoint = settings_to_hand_on(run.config, sampler), run.checkpoint._replace(step=run.step)
    if (width := _other_width(run, network)) is not None:
        # The automatic second width suits any; and what was measured is of the EMA of the checkpoint.
        snapshots = replace(settings.ema_snapshots, second=0.0)
        settings = replace(settings, ema=PowerEma(width), ema_snapshots=snapshots)
        checkpoint = checkpoint._replace(held_out_loss=None, value=None)
    target = RunFolder(folder)
    place = target.checkpoints / f"{run.step:08d}"
    make_folder(target.checkpoints, folder)
    make_folder(place, folder)
    save_weights({name: _half(tensor) for name, tensor in network.state_dict().items()}, place / EMA)
    write_weights_manifest(place, checkpoint)
    target.write_config(settings)
    written = LoadedRun(folder, device="cpu")
    written.config.data.known_in_samples()  # raises if the mask is damaged
    return written.network


def settings_to_hand_on(config: Config, sampler: Sampler) -> Config:
    """Return the settings without places on this machine, and without a guide, whose snapshots are not there."""
    evaluate = config.evaluate
    if ".pt" in evaluate.features:  # a file of weights
        evaluate = replace(evaluate, features=Evaluate.features)
    data = replace(config.data, labels=_labels(config.data.labels), condition=_condition(config.data.condition))
    return replace(
        config,
        source=_name(config.source),
        data=data,
        autoencoder_folder=_name(config.autoencoder_folder),
        text_encoder=replace(config.text_encoder, pretrained=_name(config.text_encoder.pretrained)),
        init=replace(config.init, folder=_name(config.init.folder)),
        sampler=sampler,
        guide="none",
        log=replace(config.log, sinks=()),
        evaluate=evaluate,
        checkpoint=replace(config.checkpoint, mirror=""),
    )


def _other_width(run: LoadedRun, network: nn.Module) -> float | None:
    """Return the width of the EMA that was asked for or swept; None if it is the EMA of the checkpoint."""
    if run.ema is not None:
        return float(run.ema)
    if (width := swept_width(run.path)) is None:
        return None
    own = deepcopy(network)
    load_weights(run.checkpoint.folder, "ema", own)  # which a run with a sweep has if its snapshots are gone
    return None if weights_digest(own) == weights_digest(network) else width


def _half(tensor: Tensor) -> Tensor:
    """Return a tensor as float16; unchanged if it has integers, or values too large for that."""
    half = tensor.half()
    return half if tensor.is_floating_point() and bool(half.isfinite().all()) else tensor


def _name(place: str) -> str:
    """Return the last part of a path of any system, or of a URL; "" of ""."""
    return source_name(without_secrets(place).replace("\\", "/")) if place else ""


def _labels(labels: str) -> str:
    """Return `data.labels` with the name of its table instead of the path."""
    if labels in LABELS:
        return labels
    path, _ = table_and_columns(labels)
    return _name(path) + labels.removeprefix(path)


def _condition(condition: str) -> str:
    """Return `data.condition` with names of its table and of its second sources instead of paths."""
    images, _ = split_images(condition)
    table, columns = parse_condition(condition)
    words = [f"{name}:factor={factor}" if factor else name for name, factor in images.made.items()]
    words += [f"{name}={_name(of)}{f':{kind}' if kind else ''}" for name, (of, kind) in images.second.items()]
    named = ",".join(f"{name}:{kind}" if kind else name for name, kind in columns.items())
    words += [f"{_name(table)}:{named}" if table else named] if named else []
    return ",".join(words)
