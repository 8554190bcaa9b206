"""The pipeline in an export to diffusers."""

import inspect
import math

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor

from unfog.export.given_values import read


class UnfogPipeline(DiffusionPipeline):
    """Samples with or without classes and other conditions, guidance and latents.

    `config.objective` says what the network predicts. The scheduler gets the clean image that follows from that, after
    guidance and clipping (prediction_type "sample").
    """

    _optional_components = ["vae"]  # noqa: RUF012 - diffusers reads it so

    def __init__(self, unet, scheduler, vae=None, objective=None):
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler, vae=vae)
        self.register_to_config(objective=objective)

    @torch.no_grad()
    def __call__(
        self,
        batch_size=None,
        class_labels=None,
        generator=None,
        latents=None,
        num_inference_steps=None,
        guidance_scale=None,
        output_type="pil",
        return_dict=True,
        given=None,
        prompt=None,
        negative_prompt=None,
        **conditions,
    ):
        """Generate images, such as `pipe(batch_size=4, age=60, stain="HE")` or `pipe("a red heart")`.

        Args:
            batch_size: number of images; None is one for each prompt. A text, or a list of texts, is the prompt.
            class_labels: numbers of classes, of which `config.objective["classes"]` has the names; None: all in turn.
            generator: a torch.Generator, or one for each image.
            latents: the noise to start from, standard normal, instead of drawing it.
            num_inference_steps: None is the number that the run was exported with.
            guidance_scale: None is the run's; 1 turns guidance off.
            output_type: "pil", "np" (float [B, H, W, C] from 0 to 1) or "pt" ([B, C, H, W]).
            given: values of conditions by name, of which `config.objective["conditions"]` has kinds, categories and
                statistics. Images cycle through a list. None and an omitted condition leave it open.
            prompt: captions of a model that learned such; images cycle through a list.
            negative_prompt: a caption that guidance leads away from.
            conditions: the same as arguments of their own.
        """
        objective, device = self.config.objective, self._execution_device
        batch_size, prompt = self._count_and_prompt(batch_size, prompt)
        given = {**(given or {}), **self._prompted(prompt, {**(given or {}), **conditions})}
        away = self._negative(negative_prompt, batch_size)
        channels, size = self.unet.config.in_channels, self.unet.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        labels, columns = self._labels(class_labels, batch_size, device), self._columns(given, conditions, batch_size)
        guidance = objective["guidance"] if guidance_scale is None else guidance_scale
        if away and guidance == 1:
            raise ValueError("negative_prompt has no effect with guidance_scale = 1; give guidance_scale=2")
        if latents is None:
            latents = randn_tensor((batch_size, channels, height, width), generator, device, self.unet.dtype)
        self._set_timesteps(num_inference_steps or objective["steps"], device)
        x = None
        for index, timestep in enumerate(self.progress_bar(self.scheduler.timesteps)):
            alpha, sigma, c_noise = self._level(index, timestep)
            x = sigma * latents.to(device) if x is None else x
            x0 = self._guided(x, (alpha, sigma, c_noise), (labels, columns), guidance, away)
            noise = {"generator": generator} if objective["random"] else {}
            x = self.scheduler.step(x0, timestep, x, **noise).prev_sample
        images = (self._decoded(x) / 2 + 0.5).clamp(0, 1)
        if output_type != "pt":
            images = images.cpu().permute(0, 2, 3, 1).float().numpy()
            images = self.numpy_to_pil(images) if output_type == "pil" else images
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @staticmethod
    def _count_and_prompt(first, prompt):
        """Return the number of images and the prompt, which diffusers has as the first argument."""
        if first is None or hasattr(first, "__index__"):
            batch_size = first
        elif prompt is None:
            batch_size, prompt = None, first
        else:
            raise ValueError("the first argument is a prompt, and prompt another one; give one of them")
        if batch_size is None:
            batch_size = len(prompt) if isinstance(prompt, list | tuple) else 1
        return batch_size, prompt

    def _set_timesteps(self, steps, device):
        set_timesteps, config = self.scheduler.set_timesteps, self.scheduler.config
        if config.get("use_flow_sigmas") and "sigmas" in inspect.signature(set_timesteps).parameters:
            # Left to itself, UniPC starts at 1, pure noise, and this run at 0.999.
            set_timesteps(sigmas=np.linspace(0.999, 0.999 / steps, steps), device=device)
        else:
            set_timesteps(steps, device=device)
        if hasattr(self.scheduler, "set_begin_index"):
            self.scheduler.set_begin_index(0)

    def _labels(self, class_labels, batch_size, device):
        classes = self.config.objective["classes"]
        if not classes:
            if class_labels is not None:
                raise ValueError("class_labels were given, and this network has no classes; leave them out")
            return None
        given = range(len(classes)) if class_labels is None else torch.as_tensor(class_labels).reshape(-1).tolist()
        if any(not 0 <= label <= len(classes) for label in given):
            raise ValueError(f"class_labels = {list(given)} must be from 0 to {len(classes) - 1}: {', '.join(classes)}")
        return torch.tensor([given[i % len(given)] for i in range(batch_size)], device=device)

    def _columns(self, given, named, batch_size):
        """Return a tensor for each condition besides the class."""
        if both := [name for name in named if name in (given or {})]:
            raise ValueError(f"{both[0]} is in given, and an argument of its own; leave one of them out")
        described = self.config.objective["conditions"]
        values = read(described, {**(given or {}), **named}, batch_size)
        return [torch.tensor(each, device=self._execution_device) for each in values]

    def _level(self, index, timestep):
        """Return alpha, sigma and the noise condition of the network at a step: x_t = alpha x0 + sigma noise."""
        scheduler, condition = self.scheduler, self.config.objective["condition"]
        c_noise = None
        if hasattr(scheduler, "visits"):  # levels_scheduler.py
            alpha, sigma, c_noise = scheduler.levels[scheduler.visits[index][0]]
        elif hasattr(scheduler, "sigmas"):  # DPM-Solver
            s, flow = float(scheduler.sigmas[index]), scheduler.config.use_flow_sigmas
            alpha, sigma = (1 - s, s) if flow else ((1 + s * s) ** -0.5, s * (1 + s * s) ** -0.5)
        else:  # DDPM
            kept = float(scheduler.alphas_cumprod[timestep])
            alpha, sigma = kept**0.5, (1 - kept) ** 0.5
        if c_noise is None and condition["kind"] == "timestep":
            c_noise = float(timestep)
        elif c_noise is None:
            noisiness = math.log(sigma / alpha)
            if condition["kind"] == "normal":  # quantile of a normal distribution
                c_noise = 500 * (1 + math.erf((noisiness - condition["mean"]) / condition["std"] / math.sqrt(2)))
            elif condition["kind"] == "flow":
                c_noise = 1000 / (1 + math.exp(math.log(condition["shift"]) - noisiness))
            else:
                c_noise = noisiness / 4
        return alpha, sigma, c_noise * condition["scale"]

    def _prompted(self, prompt, given, argument="prompt"):
        """Return a prompt by the name of its condition; {} for None."""
        conditions = sorted(self.config.objective["conditions"], key=lambda one: one["kind"] != "text")
        names = [one["name"] for one in conditions if one["kind"] == "text" or one["name"] == "prompt"]
        if prompt is None:
            return {}
        if not names:
            raise ValueError(f"{argument} = {str(prompt)[:60]!r}, and this model learned no captions; leave it out")
        if names[0] in given:
            raise ValueError(f"prompt and {names[0]} are the same; leave one of them out")
        return {names[0]: prompt}

    def _negative(self, negative_prompt, batch_size):
        """Return a tensor for each condition besides the class, with this text alone; None for None."""
        if negative_prompt is None:
            return None
        return self._columns(self._prompted(negative_prompt, {}, "negative_prompt"), {}, batch_size)

    def _guided(self, x, level, told, guidance, away=None):
        """Return the clean image, moved away from the estimate without conditions, or with those of `away` alone."""
        objective, (alpha, sigma, _), (labels, columns) = self.config.objective, level, told
        x0, (low, high) = self._clean(x, *level, *told), objective["guidance_interval"]
        if guidance != 1 and (labels is not None or columns) and low <= sigma / (alpha + sigma) <= high:
            hidden = None if labels is None else torch.full_like(labels, objective["null_label"])
            unknown = away or [torch.full_like(one, math.nan if one.is_floating_point() else -1) for one in columns]
            weaker = self._clean(x, *level, hidden, unknown)
            x0 = weaker + guidance * (x0 - weaker)
        return x0.clamp(-1, 1) if objective["clip"] else x0

    def _clean(self, x, alpha, sigma, c_noise, labels, columns):
        """Return the network's estimate of the clean image, E[x0 | x_t]."""
        objective = self.config.objective
        deviation = objective["sigma_data"]
        norm = math.sqrt(sigma**2 + (deviation * alpha) ** 2)
        inputs = x / norm if objective["scale_input"] else x
        condition = torch.full((len(x),), c_noise, dtype=torch.float32, device=x.device)
        told = {"columns": columns} if columns else {}
        y = self.unet(inputs, condition, class_labels=labels, **told).sample[:, : x.shape[1]]
        # The network predicts y = a x0 + b noise.
        a, b = {
            "eps": (0.0, 1.0),
            "x0": (1.0, 0.0),
            "v": (-sigma, alpha),
            "flow": (-1.0, 1.0),
            "edm": (sigma / (deviation * norm), -deviation * alpha / norm),
        }[objective["target"]]
        return (b * x - sigma * y) / (alpha * b - sigma * a)

    def _decoded(self, x0):
        if self.vae is None:
            return x0
        latents = self.config.objective["latents"]
        scale, mean = (torch.tensor(latents[name], device=x0.device)[:, None, None] for name in ("scale", "mean"))
        return self.vae.decode(x0 * scale + mean).sample
