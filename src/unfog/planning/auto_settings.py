"""Automatic settings: every open setting is chosen once, printed, recorded, and stored in config.toml."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch

from unfog.config.schema import Config
from unfog.config.validate import parse_duration
from unfog.data.dataset import ImageSet
from unfog.errors import RequestError
from unfog.models.network_settings import CustomNetwork
from unfog.models.settings import SIZES, USUAL_TEXT_LAYERS, Architecture, TextEncoderSettings, UNet
from unfog.pipeline.build import build_network
from unfog.planning.flops import Device, NetworkCost, TimeRange
from unfog.planning.intervals import Changes, Choice, choose_intervals, open_intervals
from unfog.planning.microbatch import Machine, MicrobatchChoice
from unfog.planning.timing import StepTime, forward_passes, measure_step, measure_step_at_most
from unfog.process.device import choose_gpu, unused_gpu
from unfog.reporting.progress import format_duration, warn
from unfog.settings import AUTO, is_auto
from unfog.text import format_bytes, plural
from unfog.training.learning_rate import FINE_TUNING_FACTOR, default_learning_rate
from unfog.training.precision import default_memory_format, default_precision
from unfog.training.settings import USUAL_BATCH, MemoryFormat, PrecisionName
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.values.image_format import ImageFormat, size_of

# Of a small image most convolutions are at 8x8 and 4x4 pixels, where 64 images are too few for a GPU. On paper: no GPU
# has shown it. `_LARGE_BATCH_ON = ()` gives every device the same batch.
_LARGE_BATCH, _SMALL_SIDE, _LARGE_BATCH_ON = 256, 32, ("cuda",)

# Whether steps are captured on CUDA where that is open. On an H200 a captured step of `small` is 10 times as fast, one
# of `cifar10` 1.6 times, one of a large `dit` 1.04 times. Its bits are those of a plain step, but for fused norms.
_CAPTURES_BY_ITSELF = True

# Whether `compile` may be on for CUDA where it is open. Off until a GPU has shown how much faster such steps are: on an
# H200 they were right, and the first one took 64 s for `tiny`. A run stores what was chosen when it began, so its
# resumes depend on neither constant. Whoever changes one changes the text of its setting and docs/devices.md too.
_COMPILES_BY_ITSELF = False
_COMPILE_SECONDS = 0.08  # for each operation of a step: some 90 s for `cifar10`. Estimated.
_LONG = 4  # times as many steps as a compiled run needs to be ahead

SAID_START = 0.1  # share of a time budget above which the time of the start is said
_LONG_START = 0.75  # share of a time budget above which the start is warned of
_FEW_STEPS = 20  # below which a time budget is short
_LEAST_STEPS = 200  # of the longer budget that is named: a loss is seen to fall, but no more


class AutoSettings:
    """Resolves the open settings of a configuration, one method for each; every choice is noted in `choices`.

    Measuring runs real training steps on a throwaway network; `stop` ends it early. Each of the `processes` takes its
    share of a batch.
    """

    def __init__(
        self,
        config: Config,
        images: ImageSet,
        machine: Machine | torch.device,
        stop: Callable[[], bool],
        processes: int = 1,
    ):
        self.machine = machine if isinstance(machine, Machine) else Machine(machine)
        self._images, self._stop, self.processes = images, stop, processes
        self.config, self.choices = config, list[Choice]()
        self._name_device(config.training.device)
        self.began: float | None = None
        """When the command began, if its time budget counts from there."""
        self.budget = 0.0
        """Seconds of that budget; 0 if the length is given in steps or images."""
        self.new_length = False
        """True once the length was resolved, rather than taken over in images."""
        self.is_hasty = False
        """Whether the time of a slow step is estimated, so that measuring it takes no minutes."""
        self._resolve_batch()  # which all other settings depend on

    def _name_device(self, wanted: str) -> None:
        """Store the device that was found, rather than auto, and note why it was chosen."""
        device = self.machine.device
        # Of several GPUs not the number, as another one may have more free memory when the run is resumed.
        self._set_training(device=device.type if wanted in (AUTO, "cuda") else str(device))
        if wanted == AUTO and (reason := unused_gpu()):
            self._note("device", device, f"torch cannot use the NVIDIA GPU: {reason}")
        of_this_machine = wanted in (AUTO, "cuda") and device.index is not None
        if of_this_machine and self.processes == 1 and (gpu := choose_gpu()) and gpu.reason:
            self._note("device", device, gpu.reason)

    def resolve(self) -> None:
        """Resolve all settings of a new run."""
        self.resolve_training()
        self.resolve_length()
        self.resolve_intervals()

    def resolve_training(self) -> None:
        """Resolve network, optimiser and the settings of a step; each may depend on those before it."""
        self.resolve_network()
        self.resolve_learning_rate()
        self.resolve_weight_decay()
        self.resolve_precision()
        self.resolve_memory_format()
        self.resolve_compile()
        self.resolve_determinism()
        self.resolve_microbatch()
        self.resolve_capture()

    def resolve_resumed(self, seen: int, before: str = "") -> None:
        """Resolve what a change of settings may have opened again, for a run that has seen so many images.

        `before` is the device that it was trained on, as stored.
        """
        self.resolve_learning_rate()
        self.resolve_precision()
        self._resolve_compile_on_another_device(before)
        self.resolve_microbatch(resuming=True)
        # Not the memory format: a run from before there was a choice keeps the one it had, and its bits.
        self.resolve_length(seen)
        self.resolve_intervals()

    def resolve_network(self) -> None:
        """Choose a network for the device and the image size, and what reads the texts of the images for it.

        RequestError if images do not fit the network of the configuration.
        """
        if not self.config.task.chooses_network:
            return
        _, height, width = self.config.input_shape
        if self.config.network is not None:
            self.config.network.check((height, width))
        else:
            self._choose_network(height, width)
        self.config, choices = with_text_encoder(self.config)
        self.choices += choices

    def _choose_network(self, height: int, width: int) -> None:
        size = self._side
        if self.machine.device.type == "cpu":
            wanted, reason = ("tiny" if size <= 32 else "small"), "what a CPU trains in reasonable time"
        else:
            wanted, reason = ("cifar10" if size <= 32 else "base"), "the usual network"
        # The usual network halves the side several times; where the side is too odd for that, try those with fewer.
        sides = [shape[1:] for shape in self.config.input_shapes]
        fits = (n for n in (wanted, "small", "tiny") if all(_image_size_fits(SIZES[n], each) for each in sides))
        name = next(fits, wanted)
        self.config = replace(self.config, network=SIZES[name])
        self._note(
            "network",
            name,
            f"{reason} at {size_of(height, width)} {self.config.representation.name}",
        )

    @property
    def _side(self) -> int:
        """Side of the square with as many pixels or latents as the network's input, rounded."""
        return ImageFormat(*self.config.input_shape).square_side

    def _resolve_batch(self) -> None:
        """Choose the batch: larger where a GPU would wait for launches more than for arithmetic."""
        if not is_auto(self.config.training, "batch"):
            return
        small = self._side <= _SMALL_SIDE and self.config.task.chooses_network
        large = small and self.machine.device.type in _LARGE_BATCH_ON
        self._set_training(batch=_LARGE_BATCH if large else USUAL_BATCH)
        if large:
            self._note(
                "batch",
                _LARGE_BATCH,
                f"smaller ones leave a GPU idle at up to {_SMALL_SIDE} {self.config.representation.name}",
            )

    def resolve_learning_rate(self) -> None:
        """Choose the learning rate by the size of network and batch; lower for pretrained weights."""
        optimizer, batch = self.config.optimizer, self.config.training.batch
        if not is_auto(optimizer, "lr"):
            return
        parameters = self._parameters
        network, tuned = self.config.network or UNet(), bool(self.config.init.folder)
        # Two digits: the rule is no more exact, and it is printed and typed.
        lr = float(f"{default_learning_rate(parameters, batch, network, optimizer.method, tuned):.2g}")
        self.config = _changed(self.config, {"optimizer": {"lr": lr}})
        why = f"for {parameters / 1e6:.2f}M parameters and batches of {batch}"
        why += f", {FINE_TUNING_FACTOR:g} of the rate for random weights, to keep what these learned" if tuned else ""
        self._note("optimizer.lr", lr, why)

    def resolve_weight_decay(self) -> None:
        """Turn off weight decay where weights have a fixed norm."""
        network = self.config.network
        if network is not None and network.fixed_norm_weights and self.config.optimizer.weight_decay:
            self.config = _changed(self.config, {"optimizer": {"weight_decay": 0.0}})
            self._note("optimizer.weight_decay", 0, "the weights of this network have a fixed length")

    def resolve_microbatch(self, resuming: bool = False) -> None:
        """Split the batch where memory does not suffice for all of it; its gradient stays the same.

        The choice follows from the memory of the machine and not from what is free now: another split draws other
        noise, so a repeated command would train another model. A run that goes on takes a smaller one rather than end.
        RequestError if not even one image fits, or what was chosen or asked for does not fit what is free now.
        """
        if is_auto(self.config.training, "microbatch") and not resuming:
            self._adopt(self.machine.largest_microbatch(self.process_config(), self.processes))
        needed, available = self.machine.memory_needed(self.process_config(), self.processes)  # without a margin
        if needed < available:
            return
        fits = self.machine.largest_microbatch(self.process_config(), self.processes, available)
        if resuming:
            self._adopt(fits)
            return
        at_once = plural(microbatch_size(self.process_config().training))
        extra = " --training.checkpointing" if fits.checkpointing and not self.config.training.checkpointing else ""
        raise RequestError(
            f"{at_once} at once need about {format_bytes(needed)}, and {format_bytes(available)} of memory "
            f"are available now; close other programs, or give --microbatch {fits.microbatch}{extra}"
        )

    def _adopt(self, fit: MicrobatchChoice) -> None:
        training, share = self.config.training, self.process_config()
        if fit.microbatch != (share.training.microbatch or share.training.batch):
            self._note("microbatch", fit.microbatch, fit.reason)
            self._set_training(microbatch=fit.microbatch)
        if fit.checkpointing and not training.checkpointing:
            self._note("checkpointing", True, "not even one image fits without")
            self._set_training(checkpointing=True)

    def resolve_precision(self) -> None:
        """Choose the precision by hardware and network; a timing could choose another one when repeated."""
        if not is_auto(self.config.training, "precision"):
            return
        name: PrecisionName
        sheet = self.machine.data_sheet
        if sheet is not None and self.machine.device.type != "cpu":
            name, reason = sheet.precision, f"native to {sheet.name}"
        else:
            name, reason = default_precision(self.machine.device, lambda: self._parameters)
        self._set_training(precision=name)
        self._note("precision", name, reason)

    def resolve_memory_format(self) -> None:
        """Choose the memory format by rule, as with the precision."""
        if not is_auto(self.config.training, "memory_format"):
            return
        name: MemoryFormat = "contiguous"
        if self.config.network is not None and self.config.network.prefers_channels_last:
            name, reason = default_memory_format(self.machine.device, self.config.training.precision)
            self._note("memory_format", name, reason)
        self._set_training(memory_format=name)

    def resolve_compile(self) -> None:
        """Compile the network where the run is so long that a compiled one is ahead early, as by `plan`."""
        training, device = self.config.training, self._gpu_sheet
        if not is_auto(training, "compile"):
            return
        self._set_training(compile=False)
        if not _COMPILES_BY_ITSELF or device is None or self.sharded or not self.config.task.chooses_network:
            return
        eager, compiled = (self._middle_step_time(device, compile=on) for on in (False, True))
        step = StepTime(eager, eager), StepTime(compiled + _COMPILE_SECONDS * self.network_cost.operations, compiled)
        steps = training.steps or training.images // training.batch or parse_duration(training.budget or "1h") / eager
        if (pays := step[1].pays_from(step[0])) < steps / _LONG:
            self._set_training(compile=True)
            self._note("compile", True, f"by the data sheet of {device.name} it pays from step {pays:,.0f} on")

    def _resolve_compile_on_another_device(self, before: str) -> None:
        """Turn compilation off where a run moves from CUDA to another device, which gains nothing from it."""
        now = self.machine.device.type
        if before.startswith("cuda") and now != "cuda" and self.config.training.compile:
            self._set_training(compile=False)
            self._note("compile", False, f"the run moves from {before} to {now}, where compiling does not pay")

    def resolve_capture(self) -> None:
        """Capture steps on CUDA where all of a step is on the device, and there is memory to keep what it uses."""
        training = self.config.training
        if not is_auto(training, "capture"):
            return
        self._set_training(capture=False)
        if not (_CAPTURES_BY_ITSELF and self._can_capture):
            return
        captured = _changed(self.config, {"training": {"capture": True}})
        needed, available = self.machine.memory_needed(captured, self.processes)
        if needed < available:
            self._set_training(capture=True)
            self._note("capture", True, "a step is one launch, in place of hundreds that the GPU may wait for")

    @property
    def _can_capture(self) -> bool:
        """False if the host takes part in each step, by the settings; a run says what else prevents a capture."""
        config, training = self.config, self.config.training
        if self.machine.device.type != "cuda" or torch.version.hip is not None or config.size_buckets:
            return False
        if self.processes > 1 or microbatch_size(training) < training.batch or not config.task.chooses_network:
            return False
        if training.checkpointing and getattr(config.network, "dropout", False):
            return False
        return not (isinstance(config.network, CustomNetwork) or config.diffusion.follows_losses)

    @property
    def _gpu_sheet(self) -> Device | None:
        """Data sheet of the GPU by which compilation is chosen; None if it is not."""
        if self.config.size_buckets or self.machine.device.type != "cuda":
            return None
        return self.machine.data_sheet or Device.of_gpu(torch.cuda.get_device_name(self.machine.device))

    def _middle_step_time(self, device: Device, **changes: bool) -> float:
        training = _changed(self.process_config(), {"training": changes}).training
        return sum(self.network_cost.step_time(device, training)) / 2

    def resolve_determinism(self) -> None:
        """Let the run repeat to the bit, unless the settings say otherwise."""
        if is_auto(self.config.training, "deterministic"):
            self._set_training(deterministic="on")

    def resolve_length(self, seen: int = 0) -> None:
        """Turn steps or a time budget into a number of images; a budget begins after the `seen` images."""
        training = self.config.training
        images = training.images or training.steps * training.batch
        self.new_length = not training.images
        self.check_length()
        if not images and self.machine.data_sheet is None and not self.machine.timed:
            images = training.batch  # a plan for one step, as the speed is unknown
        elif not images:
            budget = training.budget or "1h"
            self.budget, pace = parse_duration(budget), self.seconds_per_step()
            spent = 0.0 if self.began is None else time.monotonic() - self.began
            left = max(0.0, self.budget - spent)
            images = seen + self._images_beside_evaluation(left / pace * training.batch)
            how = f"the {'predicted' if self.machine.data_sheet else 'measured'} pace of {training.batch / pace:,.0f}"
            reason = f"{budget} at {how} images/s, less what previews and evaluation take"
            reason += f"; {self.doubt_of_pace}" * bool(self.doubt_of_pace)
            if not left:
                reason = f"{budget} is used up, as the start took {format_duration(spent)}; one step is trained"
            self._note("images", max(images, training.batch), reason)
            _warn_of_short_budget(budget, spent, pace, -(-(images - seen) // training.batch))
        steps = max(1, -(-images // training.batch))
        if steps * training.batch < seen:
            raise RequestError(
                f"the run is already at step {seen // training.batch:,}, beyond the {plural(steps, 'step')} that "
                "were given; --steps and --images count from the start of the run, --budget from now"
            )
        self._set_training(images=steps * training.batch, steps=0, budget="")

    def check_length(self) -> None:
        """Raise `RequestError` where a time budget needs a measured speed, and that cannot be measured."""
        if self.sharded and not (self.config.training.images or self.config.training.steps):
            raise RequestError(
                "--budget cannot be used with --training.shard, because it measures the whole network on "
                "one device; give --steps or --images"
            )

    def _images_beside_evaluation(self, possible: float) -> int:
        """Return how many images are trained in the time of `possible`, less previews and evaluation; at least half."""
        images = possible
        for _ in range(4):  # a fixed-point iteration, as the intervals follow from the length
            training = replace(self.config.training, images=max(1, round(images)))
            config = replace(self.config, training=training)
            config = _changed(config, {section: {"every": every} for section, every in open_intervals(config).items()})
            costs = forward_passes(config, config.evaluate.images)
            aside = (sum(costs.values()) - costs["training"]) * training.images / costs["training"]
            # At least half: a short run with a costly preview is still to train.
            images = max(possible / 2, possible - aside)
        return round(images)

    def resolve_intervals(self) -> None:
        """Choose warm-up and intervals by the length."""
        changes, choices = choose_intervals(self.config)
        self.config = _changed(self.config, changes)
        self.choices += choices

    def seconds_per_step(self) -> float:
        """Return the wall time of a training step with the present settings: measured once, or predicted."""
        if self.machine.data_sheet is not None:
            step = self.predicted_step_time(self.machine.data_sheet)
            return (step.low + step.high) / 2
        return self.measured_step.step

    @property
    def doubt_of_pace(self) -> str:
        """The reason not to trust the measured time of a step; "" without one, or if no step was measured."""
        measured: StepTime | None = vars(self).get("measured_step")  # where it is kept, once it was measured
        return "" if measured is None else measured.doubt

    def predicted_step_time(self, device: Device) -> TimeRange:
        """Return the seconds of a step by the data sheet of a device."""
        return self.network_cost.step_time(device, self.process_config().training)

    @cached_property
    def network_cost(self) -> NetworkCost:
        """Floating-point operations of the network, once it is resolved."""
        return NetworkCost.of(lambda: build_network(self.config), self.config.input_shape, self.config.conditions)

    @cached_property
    def measured_step(self) -> StepTime:
        """The wall time of a training step on this machine, with the present settings."""
        config, device = self.process_config(), self.machine.device
        if not self.is_hasty:
            return measure_step(config, self._images, device, self._stop)
        operations = config.training.batch * self.network_cost.training
        return measure_step_at_most(config, self._images, device, self._stop, operations)

    def measure_eager_step(self) -> StepTime:
        """Measure a step that is not compiled, for comparison."""
        config = _changed(self.process_config(), {"training": {"compile": False}})
        return measure_step(config, self._images, self.machine.device, self._stop)

    @cached_property
    def _parameters(self) -> int:
        # Building is quick in memory; on the "meta" device it would cost a second of imports.
        return sum(p.numel() for p in build_network(self.config).parameters())

    def process_config(self) -> Config:
        """Return the configuration with the largest share of a batch that one process has."""
        training = self.config.training
        # Rounded up: the share of the rank that has most.
        batch = -(-training.batch // self.processes)
        return _changed(self.config, {"training": {"batch": batch, "microbatch": min(training.microbatch, batch)}})

    @property
    def sharded(self) -> bool:
        """True if the network is sharded over the processes (FSDP)."""
        return self.config.training.is_sharded(self.processes)

    def _set_training(self, **changes: object) -> None:
        self.config = _changed(self.config, {"training": changes})

    def _note(self, name: str, value: object, reason: str) -> None:
        self.choices.append(Choice(name, value, reason))


def _warn_of_short_budget(budget: str, spent: float, step_seconds: float, steps: int) -> None:
    """Warn if a time budget is enough for a few steps alone, or if the start took most of it; name a longer one.

    `spent` is the time of the start in seconds.
    """
    few = steps < _FEW_STEPS
    if not few and spent <= _LONG_START * parse_duration(budget):
        return
    minutes = math.ceil(max(5 * spent, spent + _LEAST_STEPS * step_seconds if few else 0.0) / 60)
    longer = f"{minutes}m" if minutes < 120 else f"{math.ceil(minutes / 60)}h"
    took = f"the start took {format_duration(spent)}" if spent > SAID_START * parse_duration(budget) else ""
    reasons = " and ".join(filter(None, [took, f"a step takes {step_seconds:.2g} s" * few]))
    warn(
        f"--budget {budget} is enough for {'only ' * few}{plural(max(1, steps), 'step')}: {reasons}; "
        f"give --budget {longer} or more,{' a smaller --size,' * few} or --steps"
    )


def with_text_encoder(config: Config) -> tuple[Config, list[Choice]]:
    """Return the settings with the layers and the width of the encoder of texts, if the images have texts.

    RequestError if the network has no attention to a text.
    """
    network, settings, choices = config.network, config.text_encoder, list[Choice]()
    if settings.pretrained and network is not None and config.conditions.text is None:
        raise RequestError("text_encoder.pretrained reads captions, and this run has none; give --condition text")
    if network is None or config.conditions.text is None:
        return config, choices
    network.check_text(True)
    if isinstance(network, CustomNetwork):
        if settings.pretrained:
            raise RequestError("text_encoder.pretrained is for networks of Unfog; a network of yours reads the tokens")
        return config, choices  # it reads the tokens by itself
    if settings.pretrained and settings.model is None:
        # Loaded only here, as it needs torch.
        from unfog.models.pretrained_text import describe_encoder

        found = describe_encoder(settings.pretrained)
        sizes = {"pretrained_width": found.width, "pretrained_length": found.length}
        settings = replace(settings, pretrained=found.folder, sha256=found.sha256, **sizes)
    if is_auto(settings, "width"):
        settings = replace(settings, width=TextEncoderSettings.width_for(network.widest))
        reason = f"by the widest layer of the network, {network.widest}"
        choices.append(Choice("text_encoder.width", settings.width, reason))
    if is_auto(settings, "layers"):
        settings = replace(settings, layers=USUAL_TEXT_LAYERS)
        choices.append(Choice("text_encoder.layers", settings.layers, "enough for captions, and quick to train"))
    return replace(config, text_encoder=settings), choices


def _changed(config: Config, changes: Changes) -> Config:
    sections = {section: replace(getattr(config, section), **values) for section, values in changes.items()}
    return replace(config, **sections)


def _image_size_fits(network: Architecture, sides: tuple[int, int]) -> bool:
    try:
        network.check(sides)
    except RequestError:
        return False
    return True
