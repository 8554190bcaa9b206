"""Compilation of a network in place, with few launches on a GPU, and the same bits each time."""

from __future__ import annotations

import operator
import os
import sys
from functools import cache, partial
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch

from unfog.errors import RequestError
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.layers import ConditionalNetwork
from unfog.process.torch_flags import set_flag
from unfog.reporting.progress import say
from unfog.training.distributed.fsdp import compile_blocks

_TOGETHER = 32  # kernels in a launch at most; what they read and write has a limit of Inductor's own
_OWN_GROUPS = "2.15"  # from which on Inductor groups kernels by the memory that they hold, and takes no other groups
_ANY_DEPTH = 10**6
_SMALL = 2**20  # numbers that a sum reads, up to which it is launched together with others


def compile_network(
    network: ConditionalNetwork | AutoencoderModel, device: torch.device, repeats: bool = True, sharded: bool = False
) -> None:
    """Compile a network in place; torch.compile(network) would prefix the names of its weights.

    On a GPU, code that `repeats` is a function of the network, the GPU and the version of torch; other code may be
    chosen by its time. Of a network that is going to be `sharded`, each block is compiled. RequestError if something
    that compiling needs is not installed.
    """
    check_can_compile(device)
    if device.type == "cuda":
        from torch._inductor import config  # takes seconds, which only compiling needs

        if repeats:
            _choose_nothing_by_time(config)
        if not sharded:
            _launch_less(config, bool(network.channels_last))
    if sharded:
        compile_blocks(network)  # gathering the weights of a sharded block would break a graph of the whole
    else:
        network.compile(dynamic=False)  # a run has a shape or two; code for any shape is slower


def check_can_compile(device: torch.device) -> None:
    """Raise RequestError if torch cannot compile for a device here: Triton or a compiler of C is not installed."""
    remedy = "or train with --training.no-compile"
    if device.type == "cuda" and find_spec("triton") is None:
        package = "triton-windows" if sys.platform == "win32" else "triton"
        raise RequestError(f"--compile needs Triton on a GPU; pip install {package}, {remedy}")
    if sys.platform == "win32":
        return  # Triton brings a compiler there, and that of Microsoft is not on the path
    # The programs that Triton and Inductor look for.
    on_mac = sys.platform == "darwin"
    variable, usual = ("CC", ["gcc", "clang"]) if device.type == "cuda" else ("CXX", ["clang++" if on_mac else "g++"])
    names = os.environ.get(variable, "").split()[:1] or usual
    if not any(map(which, names)):
        install = "install the command line tools of Xcode" if on_mac else "apt install g++"
        raise RequestError(f"--compile needs a compiler, and {' or '.join(names)} is not found; {install}, {remedy}")


def _choose_nothing_by_time(config: Any) -> None:
    """Let Inductor choose nothing by its time, as the order of a sum would be.

    A resumed run may compile anew, on another machine too, and must add alike.
    """
    if not _set_options(config, deterministic=True):
        _say_once("its compiled code may not repeat to the bit, as Inductor has no deterministic mode")
    # That mode leaves one configuration to a sum; these leave one to whatever is launched together, as a sum may be.
    _set_options(config, combo_kernels_autotune=0)
    _set_options(config, combo_kernel_per_subkernel_blocks=False)


def _launch_less(config: Any, channels_last: bool) -> None:
    """Let Inductor launch few kernels, and convolve in channels last if the network does."""
    if channels_last:
        # Otherwise a rule of thumb of Inductor's leaves most convolutions of these U-Nets in NCHW, where the tensor
        # cores need channels last: 46 of 65 in `cifar10`.
        _set_options(config, force_layout_optimization=True)
    # Linear layers of one input become one product of matrices: those of the condition in each block of a U-Net.
    _set_options(config, pre_grad_fusion_options={"batch_linear_lhs": {"max_fuse_search_depth": _ANY_DEPTH}})
    try:
        _combine_kernels(config)
    except (ImportError, AttributeError) as error:
        _say_once(f"its compiled code launches more kernels than usual, as Inductor differs ({error})")


def _combine_kernels(config: Any) -> None:
    """Launch kernels together that do not need each other, and add biases to the conditions.

    ImportError or AttributeError if Inductor is not the one that this was written for; then nothing is changed.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, OutputNode  # noqa: F401  `_is_last` needs it

    class MoveBiases(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            move_biases(graph)

        def uuid(self) -> object:
            return get_hash_for_files((__file__,))  # stored code is that of this file

    usual = ForeachKernelSchedulerNode._default_group_nodes_for_combo_kernels
    grouped: Any = partial(_groups_or_usual, usual=usual)
    for name in ("combo_kernels", "combo_kernels_autotune", "combo_kernel_max_num_nodes", "pre_grad_custom_pass"):
        getattr(config, name)
    if torch.__version__ < _OWN_GROUPS:
        set_flag(ForeachKernelSchedulerNode, "group_algorithm_for_combo_kernels", grouped)
    _set_options(config, combo_kernels=True, combo_kernel_max_num_nodes=_TOGETHER, pre_grad_custom_pass=MoveBiases())


def _set_options(config: Any, **options: object) -> bool:
    """Set options of Inductor. Return False, and set none, if it does not have all of them."""
    if not all(hasattr(config, name) for name in options):
        return False
    for name, value in options.items():
        set_flag(config, name, value)
    return True


@cache
def _say_once(what: str) -> None:
    say(f"  torch {torch.__version__}: {what}")


def move_biases(graph: torch.fx.Graph) -> None:
    """Add the bias of a convolution to the condition [B, C, 1, 1] that is added to its output, if there is one.

    The gradient of the bias is then a sum of that of the condition, and not once more of all pixels.
    """
    for node in graph.find_nodes(op="call_function", target=operator.add):
        convolution, condition = node.args
        if not all(isinstance(term, torch.fx.Node) for term in node.args) or convolution.target is not torch.conv2d:
            continue
        value = condition.meta.get("example_value")
        if len(convolution.args) < 3 or len(convolution.users) > 1 or value is None or value.shape[2:] != (1, 1):
            continue
        image, weight, bias, *rest = convolution.args
        if bias is None:
            continue
        convolution.args = image, weight, None, *rest
        with graph.inserting_before(node):
            column = graph.call_method("view", (bias, -1, 1, 1))
            # Under autocast the bias is float32 still, and would make the sum so.
            column = graph.call_method("type_as", (column, condition))
            node.args = convolution, graph.call_function(operator.add, (condition, column))


def _groups_or_usual(scheduler: Any, usual: Any) -> list[list[Any]]:
    """Return `_groups`, or the groups of Inductor itself if its schedule is not as `_groups` expects it."""
    try:
        return _groups(scheduler, usual)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        _say_once(f"its compiled code launches more kernels than usual, as Inductor differs ({error})")
        return list(usual(scheduler))


def _groups(scheduler: Any, usual: Any) -> list[list[Any]]:
    """Return nodes of Inductor's schedule that may be launched together: they do not depend on each other."""
    # Inductor groups what has the same distance from the inputs, and so never two of the gradients that nothing needs
    # but the optimiser: those of norms and biases, layer by layer. At the end they can all be launched at once.
    last = [node for node in scheduler.nodes if _is_small(node) and _is_last(node)]
    rest = [[node for node in group if _is_small(node) and node not in last] for group in usual(scheduler)]
    return [last[i : i + _TOGETHER] for i in range(0, len(last), _TOGETHER)] + rest


def _is_last(node: Any) -> bool:
    """Return whether a node runs on a GPU, and nothing needs it but what the code returns."""
    from torch._inductor.scheduler import OutputNode

    device, own = node.get_device(), node.get_nodes()
    users = [user.node for buffer in node.get_outputs() for user in buffer.users]
    on_gpu = device is not None and device.type == "cuda"
    return on_gpu and all(isinstance(user, OutputNode) or user in own for user in users)


def _is_small(node: Any) -> bool:
    """Return whether a node is not a sum of many numbers, which fills a GPU by itself."""
    from torch._inductor.virtualized import V

    if not node.is_reduction():
        return True
    _, (numel, rnumel) = node.group
    return bool(V.graph.sizevars.optimization_hint(numel * rnumel, fallback=_SMALL + 1) <= _SMALL)
