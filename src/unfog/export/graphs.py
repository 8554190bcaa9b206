"""Computation graphs of a network: ONNX by torch's exporter, and torch.export's own format. The batch is dynamic."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfog.errors import RequestError, install_command
from unfog.files.safe_files import new_file, regular_file, write_atomic

_Graph = Callable[..., Tensor]
_Shape = dict[int, Any]


class Decoder(nn.Module):
    """Map what a network generates to images: latents in the autoencoder's scale, decoded."""

    def __init__(self, autoencoder: nn.Module, mean: Sequence[float], scale: Sequence[float]):
        super().__init__()
        self.autoencoder = autoencoder
        self.mean: Tensor
        self.scale: Tensor
        self.register_buffer("mean", torch.tensor(mean)[:, None, None])
        self.register_buffer("scale", torch.tensor(scale)[:, None, None])

    def forward(self, x0: Tensor) -> Tensor:
        decoded: Tensor = self.autoencoder.decode(x0 * self.scale + self.mean)  # type: ignore[operator]
        return decoded


# Format -> extra of this package, and the packages in it that the format needs.
_PACKAGES = {"onnx": ("onnx", ("onnx", "onnxscript", "onnxruntime")), "diffusers": ("export", ("diffusers",))}


def check_packages(kind: str) -> None:
    """Raise RequestError if a package is missing that this format needs."""
    extra, needed = _PACKAGES.get(kind, ("", ()))
    if missing := [name for name in needed if not find_spec(name)]:
        raise RequestError(f"--format {kind} needs {' and '.join(missing)}: {install_command(extra)}")


def write_graph(network: nn.Module, inputs: dict[str, Tensor], output: str, path: Path) -> _Graph:
    """Write the graph of a network, load it again, and return it as a function of the inputs in order.

    Args:
        network: called with the inputs in this order.
        inputs: examples by name, with a batch of at least 2.
        output: name of the output.
        path: the new file; .onnx or .pt2 decides on the format.

    RequestError if torch cannot trace the network.
    """
    batch = torch.export.Dim("batch")
    with _quiet():
        try:
            shapes = _by_parameter(network, [{0: batch} for _ in inputs])
            program = torch.export.export(network, tuple(inputs.values()), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # a network may be anybody's code, and the tracer raises many kinds
            # The tracer prints pages, of which the first lines say what it cannot trace.
            reason = " ".join(str(error).split())[:300]
            raise RequestError(f"torch.export cannot trace this network: {type(error).__name__}: {reason}") from error
        if path.suffix == ".pt2":
            content = io.BytesIO()
            torch.export.save(program, content)  # not to the file: torch ends the process where the disk is full
            write_atomic(path, content.getbuffer(), path.parent)
            # The file, and not the program in memory: what was written is what is compared with the run.
            graph: _Graph = torch.export.load(regular_file(path, path.parent)).module()
            return graph
        made = torch.onnx.export(program, dynamo=True, input_names=list(inputs), output_names=[output], verbose=False)
        assert made is not None
        _rename_others(made.model.graph, frozenset(inputs))
        try:
            made.save(str(new_file(path, path.parent)))
        except OSError as error:  # which names no file
            size = sum(tensor.nbytes for tensor in network.state_dict().values()) / 1e6
            raise OSError(error.errno, f"{error.strerror}: its weights take {size:,.1f} MB", str(path)) from error
    return _load_onnx(path, list(inputs))


def _by_parameter(network: nn.Module, each: list[_Shape]) -> tuple[_Shape | tuple[_Shape, ...], ...]:
    """Return the shapes of the inputs by the parameters of `forward`, of which the last may take several, *inputs."""
    parameters = [*signature(network.forward).parameters.values()]
    if parameters[-1].kind is not Parameter.VAR_POSITIONAL:
        return tuple(each)
    first = len(parameters) - 1
    return tuple(each) if len(each) == first else (*each[:first], tuple(each[first:]))


def _rename_others(graph: Any, names: frozenset[str]) -> None:
    """Rename what has the name of an input in a graph of ONNX, as the exporter does not look at others."""
    others = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = {value.name for value in others} | names
    for value in others:
        if value.name in names:
            while value.name in taken:
                value.name += "_"
            taken.add(value.name)


def _load_onnx(path: Path, names: Sequence[str]) -> _Graph:
    import onnxruntime

    # On the CPU, wherever the run was sampled, so that the comparison needs no other build of the runtime.
    session = onnxruntime.InferenceSession(str(regular_file(path, path.parent)), providers=["CPUExecutionProvider"])

    def graph(*inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in zip(names, inputs)})[0])

    return graph


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what the exporters say of packages that are not needed, and of their own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
