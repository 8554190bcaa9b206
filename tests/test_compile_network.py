"""Changes to compiled code: the same results with fewer launches on a GPU. What is launched: test_cuda_aot.py."""

import pytest
import torch
from torch import nn

from unfog.compile_for_gpu import compiled_with
from unfog.pipeline.compile_network import move_biases


class _Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 3, 3)

    def forward(self, x, condition):
        return (self.conv(x) + condition[:, :, None, None]) * (self.other(x) + x[:, :1, 1:-1, 1:-1])


def moved(network, *inputs):
    """Return the output of a network whose graph is changed, and the gradients of its parameters; and the graph."""
    graphs = []

    def backend(module, inputs):
        move_biases(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    output = torch.compile(network, backend=backend, fullgraph=True)(*inputs)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    return output, gradients, graphs[0]


def test_a_bias_moves_to_the_condition_and_the_results_stay():
    torch.manual_seed(0)
    network, inputs = _Conditioned().double(), (torch.randn(4, 2, 6, 6).double(), torch.randn(4, 3).double())
    output, gradients, graph = moved(network, *inputs)
    biases = [node.args[2] is not None for node in graph.find_nodes(op="call_function", target=torch.conv2d)]
    assert biases == [False, True]  # the second is added to an image
    expected = network(*inputs)
    expected.square().sum().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(gradients, [parameter.grad for parameter in network.parameters()])


class _HalfCondition(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x, condition):
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(x) + condition


def test_a_bias_that_moves_leaves_the_precision_of_autocast():
    network, inputs = _HalfCondition(), (torch.randn(4, 2, 6, 6), torch.randn(4, 3, 1, 1).bfloat16())
    output, _, graph = moved(network, *inputs)
    assert graph.find_nodes(op="call_function", target=torch.conv2d)[0].args[2] is None
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, network(*inputs), rtol=0.02, atol=0.02)  # two roundings to eight bits


@pytest.mark.parametrize(
    ("kind", "in_place", "is_compiled"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_functions_are_compiled_on_a_gpu_with_a_compiled_network(kind, in_place, is_compiled):
    network = nn.Linear(1, 1)
    if in_place:
        network.compile()
    assert (compiled_with(network, torch.device(kind), torch.sin) is not torch.sin) == is_compiled
