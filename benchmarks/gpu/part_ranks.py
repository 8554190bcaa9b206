"""Part: processes that train together, one a GPU: NCCL's sums, and a network sharded by FSDP2 against a whole one."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unfog.pipeline.build import build_network

import networks
import torch
import torch.distributed as dist
from parts import Setting, attempt
from rows import Row
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_TOLERANCE = 1e-4  # relative: ranks sum in another order


def measure(setting: Setting) -> Iterator[Row]:
    """Yield what all ranks found: one a GPU through NCCL; where there is one GPU, two share it through gloo."""
    count = 2 if setting.cpu else torch.cuda.device_count()
    worlds = [("gloo" if setting.cpu else "nccl", count)]
    if count == 1:
        worlds.append(("gloo", 2))
    for number, (backend, size) in enumerate(worlds):
        share = (setting.seconds - 3) / len(worlds)
        yield from _world(setting, backend, size, time.monotonic() + share, setting.folder / f"meeting-{number}")


def _world(setting: Setting, backend: str, size: int, deadline: float, meeting: Path) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    words = (size, setting.cpu, backend, meeting, found)
    processes = [context.Process(target=rank, args=(number, *words), daemon=True) for number in range(size)]
    for process in processes:
        process.start()
    said = 0
    while time.monotonic() < deadline and said < 2 and (any(p.is_alive() for p in processes) or not found.empty()):
        try:
            yield found.get(timeout=0.5)
            said += 1
        except queue.Empty:
            continue
    for process in processes:
        process.join(timeout=5)
        process.kill()
    if said < 2:
        yield Row("ranks", f"the rest, {backend}", f"exit statuses {[p.exitcode for p in processes]}", "failed")


def rank(number: int, size: int, cpu: bool, backend: str, meeting: Path, found: Any) -> None:
    """Train as one of the ranks; rank 0 reports."""
    torch.set_num_threads(1)
    device = torch.device("cpu") if cpu else torch.device("cuda", number % torch.cuda.device_count())
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=number, world_size=size)
    try:
        for check in (_sums, _shards):
            try:
                row = check(device, backend)
            except Exception as error:
                row = attempt("ranks", f"{check.__name__.strip('_')}, {backend}", error)
            if number == 0:
                found.put(row)
    finally:
        dist.destroy_process_group()


def _sums(device: torch.device, backend: str) -> Row:
    """Sum a tensor over the ranks, and time a large one."""
    size, count = dist.get_world_size(), 2**20 if device.type == "cpu" else 2**26
    small = torch.arange(8.0, device=device) * (dist.get_rank() + 1)
    dist.all_reduce(small)
    right = torch.equal(small, torch.arange(8.0, device=device) * (size * (size + 1) / 2))
    large, seconds = torch.ones(count, device=device), []
    for _ in range(3):
        started = time.perf_counter()
        dist.all_reduce(large)
        large[0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    rate = 4 * count / min(seconds)
    said = f"{size} by {backend}: {'right' if right else 'WRONG'}, {rate / 1e9:.3g} GB/s of a sum"
    return Row(
        "ranks", f"all-reduce, {backend}", said, "ok" if right else "failed", {"ranks": size, "bytes_per_second": rate}
    )


def _shards(device: torch.device, backend: str) -> Row:
    """Take a step of a whole network and of a sharded one, and compare their next losses."""
    config = networks.settings_of("dit-256", cpu=device.type == "cpu")
    torch.manual_seed(0)
    x, t = torch.randn(8, *config.input_shape).to(device), torch.rand(8).to(device)
    losses = []
    for sharded in (False, True):
        network = build_network(config).to(device)
        if sharded:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            fully_shard(network, mesh=mesh)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
        for _ in range(2):
            loss = (network(x, t) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    (_, whole), (_, shards) = losses[:2], losses[2:]
    error = abs(shards - whole) / abs(whole)
    learned = losses[1] < losses[0]
    said = f"loss after a step {shards:.6f}, of the whole network {whole:.6f}"
    return Row(
        "ranks",
        f"FSDP2, {backend}",
        said,
        "ok" if error < _TOLERANCE and learned else "failed",
        {"relative_error": error},
    )
