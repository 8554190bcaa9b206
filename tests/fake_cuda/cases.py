"""Cases on fake CUDA, run in a process of their own: `python cases.py NAME ...` prints a JSON object by name."""

import json
import sys
import traceback
import warnings
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import get_args

from fakes import DEVICE, FakeCuda, Watch  # isort: skip - it must come before torch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.data.dataset import ImageSet
from unfog.data.stream import DeviceStream, ImageStream
from unfog.device.copies import to_device
from unfog.diffusion import ddpm_schedules, denoiser, likelihood, noise, sampler, steps, variance
from unfog.diffusion.editing import Edit
from unfog.evaluation import feature_networks
from unfog.evaluation.features import Features, open_features
from unfog.evaluation.held_out import HeldOut, midpoints
from unfog.inference.compute_metrics import bits_per_value
from unfog.pipeline import build
from unfog.pipeline.generate import GenerationSettings, generate_images
from unfog.training.checkpoints.snapshot import take_snapshot
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.precision import default_memory_format
from unfog.values.conditions import NO_CONDITIONS

SIDE, BATCH, STEPS = 16, 8, 1


def config_of(network="unet:channels=32/32,attention=false/true,blocks=1", precision="bf16", **changes):
    memory_format = default_memory_format(DEVICE, precision)[0]
    usual = {
        "network": network,
        "training": {"batch": BATCH, "images": 100 * BATCH, "precision": precision, "memory_format": memory_format},
        "optimizer": {"lr": 1e-3, "warmup": 1},
        "data": {"size": SIDE, "channels": 3},
    }
    return update(update(preset("default"), usual, ""), changes, "")


def whole(name, side, method="adamw", batch=64):
    """Return the settings of a network by its name, in a batch and at a side of its own."""
    training, data = {"batch": batch, "images": 100 * batch}, {"size": side}
    return config_of(name, training=training, data=data, optimizer={"method": method})


class _Stopping(TrainingHooks):
    """Hooks that end the training after `until` steps that were launched."""

    until = 0

    def __init__(self, state, batch):
        self.launched = lambda: state.seen // batch

    def stop_requested(self):
        return self.launched() >= self.until


class _Watching(_Stopping):
    """Hooks that begin to watch once a step is launched, and note what they are told of a capture."""

    watch = begin = said = None

    def stop_requested(self):
        if self.launched() == self.begin:
            self.watch().clear()
            self.watch().__enter__()
        return super().stop_requested()

    def on_capture(self, message):
        self.said = message

    def on_capture_lost(self, state, reason):
        self.said = f"lost after {self.launched()} steps: {reason}"


class _FakeStream(ImageStream):
    """A stream whose batches are fake tensors of the CPU."""

    mode = watch = None
    seen = staticmethod(int)

    def batch(self, first, size):
        real = super().batch(first, size)
        self.watch().named["read ahead"] += first >= self.seen() + BATCH
        conditions = real.conditions.apply(self.mode.from_tensor)
        return type(real)(real.first, self.mode.from_tensor(real.pixels), conditions, real.index)


def _on_device(fake, config):
    """Build networks on the device at once: `Module.to` would wait for a copy of every weight, as a start may."""
    real, to = build.build_network, torch.nn.Module.to

    def made(config):
        with DEVICE:
            return real(config)

    def moved(module, *args, **kwargs):
        there = all(parameter.device.type == "cuda" for parameter in module.parameters())
        return module if there else to(module, *args, **kwargs)

    fake.set(build, "build_network", made)
    fake.set(torch.nn.Module, "to", moved)


def step_of(
    config,
    latents=False,
    mutate=lambda state: None,
    plant=None,
    snapshot=None,
    resumed=False,
    kept=False,
    whole=False,
    converted=False,
):
    """Return what `STEPS` steps of the real loop do, after a first one; or what a `snapshot` does after them, of which
    so many bytes are pinned at most.

    `plant` is called with the loss of each micro-batch and its images; `mutate` with the state before training. A
    state that is `resumed` is read from a checkpoint that the CPU wrote after its first step. Images that are `kept`
    are on the device from the start. Weights are `converted` at each use if they are not kept in channels_last. Of
    a run as a `whole`, what is captured is watched, and the steps after the sixth.
    """
    stored = _checkpoint_of(config) if resumed else None
    with FakeCuda() as fake:
        _on_device(fake, config)
        if converted:
            fake.set(build, "_WEIGHTS_CHANNELS_LAST_ON", ())
        shape = config.input_shape
        pixels = (
            np.zeros((64, 1 + config.data.flip, *shape), np.float16) if latents else np.zeros((64, *shape), np.uint8)
        )
        labels = np.zeros(64, np.int64) if config.classes else None
        with fake.mode:
            state = build.build_state(config, DEVICE)
            if stored is not None:
                _resume(fake, state, stored)
            mutate(state)
            stream = _FakeStream(ImageSet.labelled(pixels, labels, ["image"] * 64, config.classes), 0)
            stream.mode, stream.watch, stream.seen = fake.mode, lambda: fake.watch, lambda: state.seen
            loss_function = build.build_loss(config, state)

            def loss(network, x0, conditions):
                loss = loss_function(network, x0, conditions)
                if plant:
                    plant(loss.per_image, x0)
                return loss

            images = DeviceStream(stream, DEVICE) if kept else stream
            task = Task(images, build.build_augmentation(config), loss)
            hooks, settings = _Stopping(state, config.training.batch), LoopSettings(config.training, config.optimizer)
            if whole:
                return _whole_run(fake, settings, state, task)
            for steps in (1, STEPS):
                hooks.until += steps
                fake.watch.clear()
                with fake.watch:
                    train(settings, state, task, hooks)
            if snapshot is not None:
                fake.watch.clear()
                with fake.watch:
                    take_snapshot(state, STEPS, most_pinned=snapshot)
        return fake.watch


def _whole_run(fake, settings, state, task):
    """Return what `STEPS` steps after the sixth do, together with what waits and is copied in a captured one."""
    hooks = _Watching(state, settings.training.batch)
    hooks.begin, hooks.until, hooks.watch = 6, 6 + STEPS, lambda: fake.watch
    train(settings, state, task, hooks)
    if hooks.launched() > hooks.begin:
        fake.watch.__exit__(None, None, None)
    fake.watch.left = {
        "default stream": fake.stream is fake.first_stream,
        "generator is free": fake.generator_is_free,
        "pools of captures": len(fake.pools),
        "gradients": sum(parameter.grad is not None for parameter in state.model.parameters()),
    }
    if fake.graph is not None and not fake.watch.left["pools of captures"]:
        captured = fake.graph.watch
        fake.watch.named["captured"] = captured.operations
        fake.watch.faults.update(captured.faults)
        fake.watch.faults.update({f"captured {what}": n for what, n in (captured.waits + captured.copies).items()})
        fake.watch.attention, fake.watch.layouts = captured.attention, captured.layouts
    fake.watch.said = hooks.said
    return fake.watch


def _invalidate(loss, x0):
    """As work that a capture does not allow, such as a wait for the device."""
    if FakeCuda.latest.capturing:
        FakeCuda.latest.invalidated = True
        raise RuntimeError("operation not permitted when stream is capturing")


def _refuse(loss, x0):
    """As torch, for what it knows that a capture does not allow."""
    if FakeCuda.latest.capturing:
        raise RuntimeError("Cannot call this during a capture")


def _checkpoint_of(config):
    """Return what a checkpoint holds after a first step on the CPU."""
    state = build.build_state(config, torch.device("cpu"))
    for parameter in state.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state.optimizer.step()
    return state.tensors(), state.progress()


def _resume(fake, state, stored):
    """Load a checkpoint as a resume does, whose files are read to the CPU."""
    files, progress = stored
    state.load_full(tree_map_only(torch.Tensor, fake.mode.from_tensor, files), progress)


def measuring_of(measure, few=2, more=3):
    """Return what a measurement does for an image more: `measure` is called with two numbers of images."""
    watches = []
    with FakeCuda() as fake, fake.mode:
        for owner, name in HOST_ARITHMETIC:
            fake.set(owner, name, _for_real(getattr(owner, name)))
        fake.set(noise.NoiseSource, "draw", _fake_noise(fake.mode))
        for count in (few, more):
            fake.watch = Watch()
            with fake.watch:
                measure(fake, count)
            watches.append(fake.watch)
    return _difference(*watches)


def _difference(few, more):
    for what in ("waits", "copies", "named"):
        setattr(more, what, getattr(more, what) - getattr(few, what))
    more.operations -= few.operations
    return more


HOST_ARITHMETIC = (
    *((sampler, "_levels_on"), (sampler.Sampler, "visits"), (sampler.Sampler, "levels"), (steps, "_solve")),
    *((sampler.Sampler, "_noisier"), (sampler, "_repeated"), (denoiser, "inside_interval")),
    (feature_networks, "_neighbours"),
    *(
        (variance, "deviation"),
        (likelihood, "group_steps"),
        (ddpm_schedules.TimestepSchedule, "table"),
        (ddpm_schedules.TimestepSchedule, "limits"),
    ),
)
"""Functions that compute coefficients on the CPU, whose values the host needs."""


def sampling_of(config, label="dpmpp", edit=None, **settings):
    """Return what the steps of a sampler do: those of 12 steps less those of 10, which start and end alike."""
    watches = []
    with FakeCuda() as fake:
        _on_device(fake, config)
        for owner, name in HOST_ARITHMETIC:
            fake.set(owner, name, _for_real(getattr(owner, name)))
        fake.set(noise.NoiseSource, "draw", _fake_noise(fake.mode))
        with fake.mode:
            network = build.build_network(config)
            for count in (10, 12):
                chosen = replace(config.sampler, kind=label, steps=count)
                edited = edit and Edit(**tree_map_only(torch.Tensor, fake.mode.from_tensor, edit))
                generation = replace(GenerationSettings.default(config, 4, 4), sampler=chosen, **settings)
                fake.watch = Watch()
                with fake.watch:
                    generate_images(network, config, generation, edit=edited)
                watches.append(fake.watch)
    return _difference(*watches)


def _for_real(function):
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _fake_noise(mode):
    def draw(source):
        with _disable_current_modes():
            noise = torch.stack([torch.randn(source.shape, generator=generator) for generator in source.generators])
        return to_device(mode.from_tensor(noise), source.device)

    return draw


MP = "mpunet:channels=32/32,attention=false/true,blocks=1"
DIT = "dit:width=64,depth=2,head_channels=32,patch=4"
SMALL = "dit:width=64,depth=1,head_channels=32,patch=4"  # the fewest operations
LEARNED_VARIANCE = {"schedule": "cosine", "target": "eps", "path": "vp", "learned_variance": True}
AUGMENTED = {"augment": 0.5, "flip": True, "jitter": 0.1, "crop": 0.2}
ADAMW = {"optimizer": {"method": "adamw"}}


def _latent_config():
    latents = {"channels": 4, "factor": 8, "mean": (0.0,) * 4, "deviation": (1.0,) * 4}
    return config_of(autoencoder_folder="/nowhere", latents=latents, data={"size": 8 * SIDE, "flip": True})


IMAGE = torch.zeros(3, SIDE, SIDE)
KINDS = [kind for kind in get_args(sampler.Kind) if kind != "adaptive"]


def _cpu_generator(loss, x0):
    torch.randn(x0.shape, generator=torch.Generator(), device=x0.device)


def _copied(loss, x0):
    to_device(torch.zeros(8), x0.device)


def _average_on_cpu(state):
    state.ema.parameters = [tensor.to("cpu") for tensor in state.ema.parameters]


def _held_out(fake, images, config=None):
    """Measure the held-out loss of images, one by one."""
    config = config or config_of(SMALL)
    _on_device(fake, config)
    network, x0 = build.build_network(config), torch.zeros(images, *config.input_shape, device=DEVICE)
    held_out = HeldOut(x0, NO_CONDITIONS, midpoints(2).to(DEVICE))
    held_out.losses(build.build_loss_at(network, config), 1)
    return network, held_out


def _bits(fake, images, config=None):
    config = config or config_of(SMALL)
    network, held_out = _held_out(fake, images, config)
    bits_per_value(SimpleNamespace(config=config, network=network), held_out, held_out, 1, 0, lambda images: None)


def _features(fake, images, name=None, network=None):
    """Compute the features of images, one by one."""
    features = open_features(name, DEVICE) if network is None else Features("", "", "", DEVICE, network)
    for _ in range(images):
        features(fake.mode.from_tensor(torch.zeros(1, 3, 20, 20, dtype=torch.uint8)))


class _Script(torch.nn.Flatten):
    """A feature network: TorchScript does not run on tensors without values, what is around it does."""


def _network(resize, range):
    return feature_networks._TorchScriptNetwork(_Script(), "", "", feature_networks._NetworkInput("", 8, range, resize))


def _norms_of_torch(state):
    for module in state.model.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.forward = partial(torch.nn.GroupNorm.forward, module)


CASES = {
    "unet bf16": lambda: step_of(config_of()),
    "unet bf16 adamw": lambda: step_of(config_of(**ADAMW)),
    "unet bf16, weights converted": lambda: step_of(config_of(), converted=True),
    "cifar10": lambda: step_of(whole("cifar10", 32)),
    "cifar10, weights converted": lambda: step_of(whole("cifar10", 32), converted=True),
    "unet fp32": lambda: step_of(config_of(precision="fp32")),
    "unet fp16": lambda: step_of(config_of(precision="fp16")),
    "unet fp16 adamw": lambda: step_of(config_of(precision="fp16", **ADAMW)),
    "unet accumulated": lambda: step_of(config_of(training={"microbatch": BATCH // 2})),
    "unet recomputed": lambda: step_of(config_of(training={"checkpointing": True})),
    "unet classes": lambda: step_of(config_of(classes=("a", "b"))),
    "unet augmented": lambda: step_of(config_of(data=AUGMENTED)),
    "unet learned variance": lambda: step_of(config_of(diffusion=LEARNED_VARIANCE)),
    "unet adaptive": lambda: step_of(config_of(diffusion={"adaptive": 0.5, "weighting": "uncertainty"})),
    "mp bf16": lambda: step_of(config_of(MP)),
    "mp fp16": lambda: step_of(config_of(MP, "fp16")),
    "dit bf16": lambda: step_of(config_of(DIT)),
    "dit fp32 adamw": lambda: step_of(config_of(DIT, "fp32", **ADAMW)),
    "latents": lambda: step_of(_latent_config(), latents=True),
    "kept images": lambda: step_of(config_of(SMALL, classes=("a", "b")), kept=True),
    "kept latents": lambda: step_of(_latent_config(), latents=True, kept=True),
    "snapshot": lambda: step_of(config_of(SMALL), snapshot=2**30),
    "snapshot, pageable": lambda: step_of(config_of(SMALL), snapshot=0),
    "captured unet": lambda: step_of(config_of(training={"capture": True}), whole=True),
    "captured unet adamw": lambda: step_of(config_of(training={"capture": True}, **ADAMW), whole=True),
    "captured fp32": lambda: step_of(config_of(SMALL, "fp32", training={"capture": True}), whole=True),
    "captured fp16": lambda: step_of(config_of(SMALL, "fp16", training={"capture": True}), whole=True),
    "captured dit": lambda: step_of(config_of(DIT, training={"capture": True}), whole=True, kept=True),
    "captured mp": lambda: step_of(config_of(MP, training={"capture": True}), whole=True),
    "captured classes": lambda: step_of(
        config_of(SMALL, classes=("a", "b"), data=AUGMENTED, training={"capture": True}), whole=True
    ),
    "captured latents": lambda: step_of(
        update(_latent_config(), {"training": {"capture": True}}, ""), latents=True, whole=True
    ),
    "not captured": lambda: step_of(config_of(SMALL, training={"capture": True, "microbatch": 4}), whole=True),
    "not captured adaptive": lambda: step_of(
        config_of(SMALL, training={"capture": True}, diffusion={"weighting": "uncertainty"}), whole=True
    ),
    "captured recomputed": lambda: step_of(
        config_of(SMALL, training={"capture": True, "checkpointing": True}), whole=True
    ),
    "not captured, dropout recomputed": lambda: step_of(
        config_of(SMALL + ",dropout=0.1", training={"capture": True, "checkpointing": True}), whole=True
    ),
    "capture invalidated": lambda: step_of(config_of(SMALL, training={"capture": True}), whole=True, plant=_invalidate),
    "capture refused": lambda: step_of(config_of(SMALL, training={"capture": True}), whole=True, plant=_refuse),
    "planted capture": lambda: step_of(config_of(SMALL, training={"capture": True}), whole=True, plant=_copied),
    "planted item": lambda: step_of(config_of(SMALL), plant=lambda loss, x0: loss.sum().item()),
    "planted bool": lambda: step_of(config_of(SMALL), plant=lambda loss, x0: bool(loss.sum() > 1)),
    "planted generator": lambda: step_of(config_of(SMALL), plant=_cpu_generator),
    "planted copy": lambda: step_of(config_of(SMALL), plant=lambda loss, x0: torch.zeros(8).to(x0.device)),
    "planted average": lambda: step_of(config_of(SMALL), mutate=_average_on_cpu),
    "planted norm": lambda: step_of(config_of(), mutate=_norms_of_torch),
    # Not the adaptive one, whose steps depend on what it draws, so that it waits for each.
    **{f"sampler {kind}": lambda kind=kind: sampling_of(config_of(), kind) for kind in KINDS},
    "sampler guided": lambda: sampling_of(config_of(classes=("a", "b")), guidance=2.0, interval=(0.0, 1.0)),
    "sampler guided within": lambda: sampling_of(config_of(classes=("a", "b")), guidance=2.0, interval=(0.2, 0.8)),
    "sampler bf16": lambda: sampling_of(config_of(), precision="bf16"),
    "sampler ddpm, learned variance": lambda: sampling_of(config_of(diffusion=LEARNED_VARIANCE), "ddpm"),
    "sampler edit": lambda: sampling_of(config_of(), edit={"image": IMAGE}),
    "sampler inpaint": lambda: sampling_of(
        config_of(SMALL), edit={"image": IMAGE, "unknown": IMAGE[:1] > 0, "repeats": 2}
    ),
    "measured held-out loss": lambda: measuring_of(_held_out),
    "measured bits": lambda: measuring_of(_bits),
    "measured bits by a table": lambda: measuring_of(
        partial(_bits, config=config_of(SMALL, diffusion=LEARNED_VARIANCE))
    ),
    "measured features texture": lambda: measuring_of(partial(_features, name="texture")),
    "measured features pixels": lambda: measuring_of(partial(_features, name="pixels")),
    "measured features tf1": lambda: measuring_of(partial(_features, network=_network("tf1", "inception"))),
    "measured features bicubic": lambda: measuring_of(partial(_features, network=_network("bicubic", "imagenet"))),
    "resume": lambda: step_of(config_of(SMALL), resumed=True),
    "resume fp16 adamw": lambda: step_of(config_of(SMALL, "fp16", **ADAMW), resumed=True),
    "autoencoder": lambda: step_of(config_of(autoencoder={"factor": 4, "channels": (32, 32)})),
}


WATCHED = ("waits", "copies", "faults", "attention", "named", "layouts")


def figures(watch):
    """Return what a test asks of a case."""
    return {what: dict(getattr(watch, what)) for what in WATCHED} | {
        "steps": STEPS,
        "operations": watch.operations,
        "converted bytes": watch.converted_bytes,
        "said": watch.said,
        "left": watch.left,
    }


def main(cases, figures):
    """Print a line of JSON for each of the cases that the command names, or of all: its figures, or its error."""
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)
    for name in sys.argv[1:] or cases:
        try:
            result = figures(cases[name]())
        except Exception as error:
            frames = "".join(traceback.format_exception(error)[-8:])
            result = {"error": f"{type(error).__name__}: {error}", "where": frames}
        print(json.dumps({"name": name, **result}), flush=True)


if __name__ == "__main__":
    main(CASES, figures)
