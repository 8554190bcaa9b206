"""Training steps of other programs beside ours: a bare one, and that of diffusers' script. Each eager or compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from unfog.config.schema import Config
from unfog.export.diffusers_unet import Network
from unfog.models.settings import DiT, UNet
from unfog.pipeline import build
from unfog.process.device import synchronize
from unfog.training.precision import Precision

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Run = Callable[[int], float]  # number of steps -> seconds until the device has finished them
_WARM_UP = 3  # steps before a graph is captured, so that everything is allocated


def timed(step: Callable[[], object], device: torch.device) -> Run:
    """Return a function that takes so many steps and returns their seconds."""

    def run(count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            step()
        synchronize(device)
        return time.perf_counter() - started

    return run


def bare(config: Config, device: torch.device, compiled: bool = False, captured: bool = False) -> Run:
    """Return the least that a step can be: our network, squared error, backward, AdamW; no data, EMA or clipping.

    A captured step is one CUDA graph, so that the host launches nothing.
    """
    network = build.build_network(config).to(device).train()
    if compiled:
        network.compile(dynamic=False)
    step = _squared_error_step(network, config, device, capturable=captured)
    return timed(_captured(step) if captured else step, device)


def _squared_error_step(
    network: nn.Module, config: Config, device: torch.device, capturable: bool
) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, fused=True, capturable=capturable)
    precision, shape = Precision(config.training.precision, device), (config.training.batch, *config.input_shape)
    x, y, t = torch.randn(shape, device=device), torch.randn(shape, device=device), torch.rand(shape[0], device=device)

    def step() -> None:
        with precision.autocast():
            loss = F.mse_loss(network(x, t).float(), y)
        precision.backward(loss)
        optimizer.step()
        # A graph writes its gradients where they were when it was captured.
        optimizer.zero_grad(set_to_none=not capturable)

    return step


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """Capture a step in a CUDA graph, on the stream of its warm-up, and return its replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def diffusers(config: Config, device: torch.device, compiled: bool = False) -> Run:
    """Return the step of diffusers' train_unconditional.py with --use_ema, on images that are on the device already.

    Noise, AdamW, cosine schedule, clipping and EMA as in the script, under autocast; the network is its counterpart.
    """
    network, call = _counterpart(config)
    network.to(device).train()
    if compiled:
        network.compile()
    precision, shape = Precision(config.training.precision, device), (config.training.batch, *config.input_shape)
    clean = torch.rand(shape, device=device) * 2 - 1
    return timed(diffusers_step(network, call, clean, precision.autocast), device)


def diffusers_step(
    network: nn.Module,
    call: Callable[[nn.Module, Tensor, Tensor], Tensor],
    clean: Tensor,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], None]:
    """Return a step of the script on images `clean`; `call` maps network, noisy images and timesteps to the noise."""
    from diffusers import DDPMScheduler
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
    rate = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=500, num_training_steps=10**5)
    ema = EMAModel(network.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)
    ema.to(clean.device)

    def step() -> None:
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, 1000, (len(clean),), device=clean.device)
        with autocast():
            answer = call(network, scheduler.add_noise(clean, noise, timesteps), timesteps)
        F.mse_loss(answer.float(), noise).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        ema.step(network.parameters())

    return step


def _counterpart(config: Config) -> tuple[nn.Module, Callable[[nn.Module, Tensor, Tensor], Tensor]]:
    """Return diffusers' network that ours equals, or the nearest of as many channels and blocks, and how to call it."""
    channels, side, _ = config.input_shape
    if isinstance(config.network, UNet):
        from diffusers import UNet2DModel

        ours = Network(config.network, channels, 0, build.build_network(config).state_dict())
        described, weights = ours.to_unet2d(side)
        network = UNet2DModel(**described)
        network.load_state_dict(weights)
        return network, lambda module, x, t: module(x, t).sample
    assert isinstance(config.network, DiT)
    from diffusers import DiTTransformer2DModel

    settings = config.network
    network = DiTTransformer2DModel(
        num_attention_heads=settings.width // settings.head_channels,
        attention_head_dim=settings.head_channels,
        in_channels=channels,
        out_channels=channels,
        num_layers=settings.depth,
        sample_size=side,
        patch_size=settings.patch,
    )
    return network, lambda module, x, t: module(x, t, class_labels=torch.zeros_like(t)).sample
