"""Compilation of a network in place, with few launches on a GPU, and the same bits each time."""

from __future__ import annotations

import operator
from typing import Any

import torch

from unfog.models.autoencoder import AutoencoderModel
from unfog.models.layers import ConditionalNetwork

_TOGETHER = 32  # kernels in a launch at most; what they read and write has a limit of Inductor's own
_ANY_DEPTH = 10**6
_SMALL = 2**20  # numbers that a sum reads, up to which it is launched together with others


def compile_network(network: ConditionalNetwork | AutoencoderModel, device: torch.device) -> None:
    """Compile a network in place; torch.compile(network) would prefix the names of its weights."""
    if device.type == "cuda":
        _set_up_inductor(bool(network.channels_last))
    network.compile(dynamic=False)  # a run has a shape or two; code for any shape is slower


def _set_up_inductor(channels_last: bool) -> None:
    from torch._inductor import config  # takes seconds, which only compiling needs

    if channels_last:
        # Otherwise a rule of thumb of Inductor's leaves most convolutions of these U-Nets in NCHW, where the tensor
        # cores need channels last: 46 of 65 in `cifar10`.
        config.force_layout_optimization = True
    # Linear layers of one input become one product of matrices: those of the condition in each block of a U-Net.
    config.pre_grad_fusion_options = {"batch_linear_lhs": {"max_fuse_search_depth": _ANY_DEPTH}}
    if not hasattr(config, "deterministic") or not hasattr(config, "combo_kernels_pointwise_only"):
        return  # an older version of torch
    # Nothing is chosen by its time, as the order of a sum would be: a resumed run compiles anew, and must add alike.
    config.deterministic = True
    # Kernels that do not need each other become one launch. What they compute is a function of the code alone, as
    # each has one configuration then, reductions too.
    config.combo_kernels, config.combo_kernel_max_num_nodes = True, _TOGETHER

    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.scheduler import ForeachKernelSchedulerNode

    class MoveBiases(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            move_biases(graph)

        def uuid(self) -> object:
            return get_hash_for_files((__file__,))  # stored code is that of this file

    config.pre_grad_custom_pass = MoveBiases()
    usual = ForeachKernelSchedulerNode._default_group_nodes_for_combo_kernels
    ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels(lambda scheduler: _groups(scheduler, usual))


def move_biases(graph: torch.fx.Graph) -> None:
    """Add the bias of a convolution to the condition [B, C, 1, 1] that is added to its output, where there is one.

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


def _groups(scheduler: Any, usual: Any) -> list[list[Any]]:
    """Return nodes of Inductor's schedule that may be launched together, none of which needs another."""
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
    """Return whether a node is no sum of many numbers, which fills a GPU by itself."""
    from torch._inductor.virtualized import V

    if not node.is_reduction():
        return True
    _, (numel, rnumel) = node.group
    return bool(V.graph.sizevars.optimization_hint(numel * rnumel, fallback=_SMALL + 1) <= _SMALL)
