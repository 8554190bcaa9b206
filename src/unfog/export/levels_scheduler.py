"""A scheduler of an Unfog run, in plain torch and diffusers: DDIM, DPM-Solver++(2M) or Heun on given noise levels.

It is there for noise levels, paths and methods that no scheduler of diffusers has, such as Heun's method of EDM. Its
steps take the predicted clean image (prediction_type "sample") and a state x = alpha x0 + sigma noise.
"""

import math

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerOutput

RHO = 7.0  # of EDM's time steps
PURE_NOISE = 100.0  # sigma / alpha from which Heun's correction only adds error


class LevelsScheduler(SchedulerMixin, ConfigMixin):
    """Steps from one noise level to the next.

    Args:
        kind: ddim, dpmpp or heun.
        path: vp, ve or flow: how alpha and sigma follow from the log SNR.
        grid: karras or logsnr, for any number of steps, or list, for the number of `levels`.
        noisiest: log SNR at which sampling starts, and `cleanest` at which its last step does.
        levels: alpha, sigma and noise condition of each level, noisiest first.
    """

    order = 1
    init_noise_sigma = 1.0

    @register_to_config
    def __init__(self, kind="dpmpp", path="flow", grid="karras", noisiest=-8.8, cleanest=12.4, levels=None):
        self.levels, self.visits, self.timesteps = [], [], None

    def set_timesteps(self, num_inference_steps, device=None):
        """Choose the noise levels, and the level of each call of the network."""
        config, count = self.config, num_inference_steps
        if config.grid == "list" and count != len(config.levels):
            raise ValueError(
                f"num_inference_steps = {count}: this run was exported for {len(config.levels)} steps; export it again "
                f"with --steps {count}"
            )
        if config.grid == "list":
            self.levels = [tuple(level) for level in config.levels]
        else:
            self.levels = [(*self._on_path(logsnr), None) for logsnr in self._grid(count)]
        # (level, whether this call corrects the step that led to it)
        self.visits = []
        for index, (alpha, sigma, _) in enumerate(self.levels):
            self.visits.append((index, False))
            # No correction into the last level, and none from pure noise: as in `diffusion.steps.heun`.
            if config.kind == "heun" and index < count - 1 and sigma <= PURE_NOISE * alpha:
                self.visits.append((index + 1, True))
        self.timesteps = torch.arange(len(self.visits), device=device)
        # Or a second image would be extrapolated from the last guess of the first.
        self._before = None

    def _grid(self, count):
        ends = (self.config.noisiest, self.config.cleanest)
        if self.config.grid == "logsnr":
            return torch.linspace(*ends, count, dtype=torch.float64).tolist()
        first, last = (math.exp(-logsnr / 2 / RHO) for logsnr in ends)
        return (-2 * RHO * torch.linspace(first, last, count, dtype=torch.float64).log()).tolist()

    def _on_path(self, logsnr):
        if self.config.path == "ve":
            return 1.0, math.exp(-logsnr / 2)
        half = logsnr / 2 if self.config.path == "flow" else logsnr
        alpha, sigma = 1 / (1 + math.exp(-half)), 1 / (1 + math.exp(half))
        return (alpha, sigma) if self.config.path == "flow" else (math.sqrt(alpha), math.sqrt(sigma))

    def step(self, model_output, timestep, sample, generator=None, return_dict=True):
        """Return the state at the next level; `model_output` is the clean image, `timestep` the number of the call."""
        index, corrects = self.visits[int(timestep)]
        x0, now = model_output, self.levels[index]
        if corrects:  # Heun: the mean of the slopes at both ends of the step
            start, before = self._before
            ratio = start[1] / start[0] * now[0] / now[1]
            moved = sample + now[0] * (ratio - 1) / 2 * (x0 - before)
        else:
            then = self.levels[index + 1] if index + 1 < len(self.levels) else (1.0, 0.0, None)
            guess = self._guess(x0, now, then) if self.config.kind == "dpmpp" else x0
            moved = then[0] * guess + then[1] / now[1] * (sample - now[0] * guess)
            self._before = (now, x0)
        return SchedulerOutput(prev_sample=moved) if return_dict else (moved,)

    def _guess(self, x0, now, then):
        """Extrapolate x0 to the middle of the step, from the last two."""
        if self._before is None or then[1] == 0 or self._before[0][0] == 0:
            return x0
        last, before = self._before
        a, b, c = (math.log(level[0] / level[1]) for level in (last, now, then))
        return x0 + (c - b) / (b - a) / 2 * (x0 - before)
