"""Other names of commands, settings and Python arguments: old ones, which keep working, and those of other trainers.

A renamed setting is read under both names from config.toml, flags and Python. Digests of settings
(`resume_rules.settings_digests`) are computed over the old name, so that a checkpoint of an earlier version compares
equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from unfog.errors import RequestError

T = TypeVar("T")

COMMANDS = {"train-codec": "train-autoencoder"}

# Dotted names in the tree of settings, old to new.
_SETTINGS = {
    "averages": "ema_snapshots",
    "codec": "autoencoder_folder",
    "data.lost_shards": "data.failed_shards",
}

# Usual names in other trainers -> settings here. Understood from Python; the command line names the flag in its error.
USUAL = {
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), "training.batch"),
    **dict.fromkeys(("micro_batch_size", "microbatch_size"), "training.microbatch"),
    **dict.fromkeys(("image_size", "img_size", "resolution"), "data.size"),
    **dict.fromkeys(("horizontal_flip", "random_flip", "xflip"), "data.flip"),
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr", "train_lr"), "optimizer.lr"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "num_warmup_steps", "warmup", "warm_up"), "optimizer.warmup"),
    **dict.fromkeys(("lr_warmup", "learning_rate_warmup"), "optimizer.warmup"),
    **dict.fromkeys(("learning_rate_schedule", "lr_schedule", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), "optimizer.weight_decay"),
    "betas": "optimizer.betas",
    **dict.fromkeys(("iterations", "max_iters", "max_steps", "num_iterations", "num_steps"), "training.steps"),
    **dict.fromkeys(
        ("max_train_steps", "num_train_steps", "total_steps", "train_num_steps", "train_steps"), "training.steps"
    ),
    **dict.fromkeys(("clipping", "clip_grad", "clip_grad_norm", "grad_clip", "max_norm"), "training.clip"),
    **dict.fromkeys(("gradient_clip", "gradient_clip_val", "gradient_clipping", "max_grad_norm"), "training.clip"),
    **dict.fromkeys(("dtype", "mixed_precision"), "training.precision"),
    "gradient_checkpointing": "training.checkpointing",
    "random_seed": "training.seed",
    "model": "network",
    **dict.fromkeys(("beta_schedule", "ddpm_beta_schedule", "noise_schedule"), "diffusion.schedule"),
    **dict.fromkeys(("parameterization", "prediction_type"), "diffusion.target"),
    **dict.fromkeys(("cfg_scale", "guidance_scale"), "guidance"),
    **dict.fromkeys(("cond_drop_prob", "class_dropout"), "label_dropout"),
    **dict.fromkeys(("checkpoint_every", "checkpointing_steps", "save_every", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("preview_every", "sample_every"), "preview.every"),
    **dict.fromkeys(("eval_every", "eval_steps", "evaluate_every"), "evaluate.every"),
    **dict.fromkeys(("log_every", "logging_steps"), "log.every"),
}

# Of arguments of `Run.sample`.
SAMPLING = {
    **dict.fromkeys(("num_images", "num_samples"), "n"),
    **dict.fromkeys(("num_inference_steps", "num_steps", "sampling_steps"), "steps"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance_scale"), "guidance"),
    "batch_size": "batch",
    "random_seed": "seed",
    "negative_prompt": "negative",
    **dict.fromkeys(("class_labels", "classes", "labels"), "label"),
}

# Usual names of the argument `out`.
OUT = ("output", "output_dir", "out_dir", "run_dir", "save_dir")
# Usual names of a length that no setting has, as it is given in steps, images or time.
EPOCHS = ("epochs", "max_epochs", "n_epoch", "n_epochs", "num_epochs", "num_train_epochs")


def usual_arguments(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments by their names here, where `names` has them. RequestError if one is given twice."""
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        here = names.get(name, name)
        if here in renamed or (here != name and here in given):
            raise RequestError(f"{here} is given twice, once as {name}; give one of them")
        renamed[here] = value
    return renamed


def with_old_defaults(command: str, request: T) -> T:
    """Return a request with the defaults of an old name: scripts look for what train-codec made in a -codec folder."""
    return replace(request, suffix="-codec") if command == "train-codec" else request  # type: ignore[type-var]


def current_name(setting: str) -> str:
    """Return the present dotted name of a setting: "averages.every" becomes "ema_snapshots.every"."""
    return _renamed(setting, _SETTINGS)


def stored_name(setting: str) -> str:
    """Return the dotted name that digests of settings are computed over: the oldest one."""
    return _renamed(setting, {new: old for old, new in _SETTINGS.items()})


def _renamed(setting: str, names: dict[str, str]) -> str:
    for one, other in names.items():
        # With its dot, so that a setting whose name only begins with the same letters keeps it.
        if setting == one or setting.startswith(f"{one}."):
            return other + setting[len(one) :]
    return setting
