"""A network that is given from Python as an object: its settings, its contract, and the copies that a run trains."""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from unfog.errors import RequestError
from unfog.models.network_settings import CustomNetwork, channels_remedy
from unfog.values.condition_format import ConditionFormat

# In a run: the source of the classes of its network, for people to read; nothing executes it.
SOURCE_FILE = "network-source.txt"

_CONTRACT = (
    "a network is called as forward(x, noise, label=None), with x float32 [B, C, H, W], noise float32 [B], the noise "
    "level of each image from 0 to 1000, and label int64 [B], or None without classes; it returns one tensor like x. "
    "Images with conditions: forward(x, noise, age, stain), by their names"
)
_OWN_PACKAGES = ("torch", "torchvision", "unfog")  # whose classes everybody has
_LONGEST_REPR = 20_000  # characters
# (path, structure) -> the object that was given last.
# Outside of the settings, which are written to a file: an object cannot be.
_given: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True)
class GivenNetwork(CustomNetwork):
    """A network that was given as an object: `unfog.train(source, network=Net())`, also to `load` and `resume`.

    A run trains a copy, which begins with the weights of the object. The settings name its class, but the run does not
    store its code: to load the run, give such an object again, with any weights.
    """

    kind: ClassVar[str] = "given"
    structure: str = ""
    """Digest of the names, shapes and types of its weights."""

    @staticmethod
    def accepts(value: object) -> bool:
        """Return True for a torch.nn.Module, without importing torch."""
        return any(base.__module__ == "torch.nn.modules.module" for base in type(value).__mro__)

    @classmethod
    def of(cls, network: Any) -> GivenNetwork:
        """Keep the object for `build`, and return its settings. RequestError if it cannot be trained."""
        # Weights of a compiled network are named "_orig_mod.…", which a plain one could not load.
        network = getattr(network, "_orig_mod", network)  # of torch.compile
        _check(network)
        settings = cls(path=_class_path(network), structure=_structure(network))
        _given[settings.path, settings.structure] = _copy(network)
        return settings

    def adopt(self, network: Any) -> None:
        """Keep an object for `build` of a run with these settings. RequestError if its weights are others."""
        network = getattr(network, "_orig_mod", network)
        _check(network)
        if (found := _structure(network)) != self.structure:
            raise RequestError(
                f"network = {_class_path(network)} has other weights than the network of the run, {self.path}, by "
                f"names, shapes or types (digest {found}, not {self.structure}); give one built as for training, see "
                f"{SOURCE_FILE} in the run"
            )
        _given[self.path, self.structure] = _copy(network)

    def load(self) -> Any:
        """Return the object. Raise RequestError, which says what is needed, if none was given in this process."""
        if (network := _given.get((self.path, self.structure))) is None:
            raise RequestError(
                f"the network of this run was given from Python, as an object of {self.path}; give one built in the "
                f"same way: unfog.load(run, network={self.path.rpartition('.')[2]}(...)), and the same for resume "
                f"({SOURCE_FILE} in the run has its source)"
            )
        return network

    def check(self, size: int | tuple[int, int]) -> None:
        if not self.path:
            raise RequestError("network = given stands for an object from Python: unfog.train(source, network=Net())")

    def build(self, channels: int, conditions: ConditionFormat, out_channels: int | None) -> Any:
        if conditions.augment_inputs:
            raise RequestError(f"data.augment needs a network with an input for it, and {_CONTRACT}; leave augment out")
        network = _copy(self.load())
        network.image_channels, network.num_classes = channels, len(conditions.classes)
        return network

    def try_out(self, network: Any, shape: tuple[int, int, int], format: ConditionFormat, out_channels: int) -> None:
        """Call the network on two images, so that errors surface before training.

        Raises:
            RequestError: it fails, or its output is not finite, does not follow from the weights, or has another shape.
        """
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        classes, trains = len(format.classes), network.training
        # The conditions of the second image are hidden, as in training with label_dropout.
        conditions = format.blank(2).dropped(torch.tensor([False, True]))
        said = f"x {[2, *shape]}, noise [2] and " + (f"label [0, {classes}]" if classes else "label None")
        if format.columns:
            told = ", ".join([*["label"] * bool(classes), *(one.name for one in format.columns)])
            said = f"x {[2, *shape]}, noise [2] and {told}, hidden for the second image"
        network.eval()  # or layers such as BatchNorm would learn from these images
        try:
            with torch.enable_grad():
                found = network(torch.zeros(2, *shape), torch.tensor([0.5, 999.0]), conditions)
                if format.mask_channels:  # training gives a mask, and samples without unknown values have none
                    said += ", with a mask `known`"
                    masked = conditions._replace(known=torch.ones(2, *shape))
                    network(torch.zeros(2, *shape), torch.tensor([0.5, 999.0]), masked)
        except Exception as error:  # anything may go wrong in other people's code
            hint = channels_remedy(lambda x: network(x, torch.tensor([0.5]), conditions.rows(slice(1))), shape)
            if classes and not hint:
                hint = f". The label {classes} stands for no class, so an embedding has {classes + 1} rows; to train "
                hint += "without classes: labels='none'"
            if format.columns and not hint:
                hint = ". A hidden number is NaN, and a hidden one of K categories is K, so an embedding has K + 1 rows"
            raise self._refusal(f"fails for {said}: {type(error).__name__}: {error}", hint) from error
        finally:
            network.train(trains)
        expected = [2, out_channels, *shape[1:]]
        if not isinstance(found, torch.Tensor):
            raise self._refusal(f"returns a {type(found).__name__}, and a tensor {expected} is needed")
        if [*found.shape] != expected or not found.is_floating_point():
            raise self._refusal(f"returns {found.dtype} {[*found.shape]} for {said}, and float {expected} is needed")
        if not found.requires_grad:
            raise self._refusal("returns a tensor without a gradient, as after detach or no_grad")
        if not isinstance(found, FakeTensor) and not bool(found.isfinite().all()):
            hint = ". A hidden number is NaN: replace it, as torch.nan_to_num(age) does" * bool(format.columns)
            raise self._refusal(f"returns values that are not finite for {said}", hint)

    def _refusal(self, problem: str, hint: str = "") -> RequestError:
        return RequestError(f"{self.path} {problem}; {_CONTRACT}{hint}")

    def source_text(self) -> str:
        """Return the source of the classes of the network, other than torch's; a line says where it is not known."""
        classes = dict.fromkeys(type(part) for part in self.load().modules())
        printed = repr(self.load())[:_LONGEST_REPR].replace("\n", "\n#   ")
        parts = [f"# The network of this run, of {self.path}. To be read: nothing executes this file.\n#   {printed}\n"]
        for kind in classes:
            if kind.__module__.partition(".")[0] not in _OWN_PACKAGES:
                parts.append(f"\n# {kind.__module__}.{kind.__qualname__}\n{_source_of(kind)}\n")
        return "".join(parts)


def _source_of(kind: type) -> str:
    with suppress(OSError, TypeError):
        return inspect.getsource(kind)
    # Of a class in a cell of a notebook, Python finds the cell only through its functions.
    for function in filter(inspect.isfunction, vars(kind).values()):
        with suppress(OSError, SyntaxError):
            text = "".join(inspect.findsource(function)[0])
            found = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            if node := next((node for node in found if node.name == kind.__name__), None):
                return ast.get_source_segment(text, node) or text
    return "# its source is not known"


def _class_path(network: Any) -> str:
    return f"{type(network).__module__}.{type(network).__qualname__}"


def _structure(network: Any) -> str:
    named = [*network.named_parameters(), *network.named_buffers()]
    # Not the values: a resume gives a fresh object, which the checkpoint fills.
    described = sorted((name, tuple(values.shape), str(values.dtype)) for name, values in named)
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _check(network: Any) -> None:
    """Raise RequestError if training could not begin, whatever the images are."""
    import torch

    path, parameters = _class_path(network), list(network.parameters())
    if any(torch.nn.parameter.is_lazy(one) for one in parameters):
        raise RequestError(f"network = {path} has lazy layers without a shape; call it once on an image before")
    if not any(one.requires_grad for one in parameters):
        raise RequestError(f"network = {path} has no parameter to train; give a torch.nn.Module with requires_grad")
    if other := next((one.dtype for one in parameters if one.dtype != torch.float32), None):
        raise RequestError(
            f"network = {path} has parameters of {other}, and weights are trained in float32; give it as "
            "network.float(), and precision='bf16' to compute in less"
        )
    signature = inspect.signature(network.forward)
    others = list(signature.parameters.values())[2:]
    by_name = any(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in others)
    # Parameters named as columns of the images are checked by `take_conditions`.
    if not by_name and sum(one.default is one.empty for one in others) < 2:
        try:
            signature.bind(None, None, None)
        except TypeError as error:
            raise RequestError(
                f"network = {path} cannot be called with three arguments ({error}); {_CONTRACT}"
            ) from None


def _copy(network: Any) -> Any:
    """Return a copy on the CPU, or with tensors of the mode that is active, which may have shapes alone."""
    import torch

    copies: dict[int, Any] = {}
    loose = (value for part in network.modules() for value in vars(part).values())
    for one in [*network.parameters(), *network.buffers(), *(v for v in loose if isinstance(v, torch.Tensor))]:
        # By strides, as the memory layout of weights decides the order of sums, and so the bits of a run.
        fresh = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
        if type(fresh) is torch.Tensor and not fresh.is_meta:
            fresh.copy_(one.detach())
        is_parameter = isinstance(one, torch.nn.Parameter)
        copies[id(one)] = torch.nn.Parameter(fresh, one.requires_grad) if is_parameter else fresh
    try:
        return copy.deepcopy(network, copies)
    except Exception as error:  # anything may go wrong in other people's code
        raise RequestError(f"network = {_class_path(network)} cannot be copied: {error}; give one that can") from error
