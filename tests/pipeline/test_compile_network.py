"""Changes to compiled code: the same results with fewer launches on a GPU. What is launched: test_cuda_aot.py."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unfog.device.compilation import compiled_with
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective, noised, stratified, weighted_error
from unfog.pipeline import compile_network  # choices of Inductor, without compiling
from unfog.pipeline.build import fitted
from unfog.pipeline.compile_network import move_biases
from unfog.process.torch_flags import caller_flags_kept


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_bias_that_moves_leaves_the_precision_of_autocast():
    network, inputs = _HalfCondition(), (torch.randn(4, 2, 6, 6), torch.randn(4, 3, 1, 1).bfloat16())
    output, _, graph = moved(network, *inputs)
    assert graph.find_nodes(op="call_function", target=torch.conv2d)[0].args[2] is None
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, network(*inputs), rtol=0.02, atol=0.02)  # two roundings to eight bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_place", "is_compiled"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_functions_are_compiled_on_a_gpu_with_a_compiled_network(kind, in_place, is_compiled):
    network = nn.Linear(1, 1)
    if in_place:
        network.compile()
    assert (compiled_with(network, torch.device(kind), torch.sin) is not torch.sin) == is_compiled


@pytest.mark.parametrize(("kind", "is_compiled"), [("cuda", True), ("cpu", False)])
def test_the_loss_is_compiled_with_the_network_and_called_as_it_is_otherwise(kind, is_compiled):
    network = nn.Linear(1, 1)
    network.compile()
    state = SimpleNamespace(model=network, precision=SimpleNamespace(device=torch.device(kind)), levels=None)
    plain = Objective(Diffusion())
    fit = fitted(plain, state)
    pairs = [(getattr(plain, name), getattr(fit, name)) for name in ("stratified", "noised", "weighted_error")]
    assert [before is not after for before, after in pairs] == [is_compiled] * 3
    assert fit == plain


@pytest.mark.slow
def test_the_functions_of_the_loss_compile_without_a_graph_break():
    compiled = partial(torch.compile, backend="aot_eager", fullgraph=True, dynamic=False)
    plain = Objective(Diffusion(), interleaved=True)
    loss = replace(
        plain, stratified=compiled(stratified), noised=compiled(noised), weighted_error=compiled(weighted_error)
    )
    results = []
    for objective in (plain, loss):
        torch.manual_seed(0)
        results.append(objective(lambda x, c_noise, conditions: x + c_noise.view(-1, 1, 1, 1), torch.rand(6, 1, 4, 4)))
    torch.testing.assert_close(results[0].per_image, results[1].per_image)
    torch.testing.assert_close(results[0].null_loss, results[1].null_loss)


@pytest.fixture
def inductor():
    """Inductor's options, as they were once the test has ended."""
    from torch._inductor import config

    compile_network._say_once.cache_clear()
    with caller_flags_kept():
        yield config


def set_up(monkeypatch, repeats=True, sharded=False, own_groups="99"):
    """Compile a network that does nothing, as on CUDA; `own_groups` is the torch that takes no groups of ours."""
    monkeypatch.setattr(compile_network, "_OWN_GROUPS", own_groups)
    monkeypatch.setattr(compile_network, "check_can_compile", lambda device: None)
    monkeypatch.setattr(compile_network, "compile_blocks", lambda network: None)
    network = nn.Identity()
    network.channels_last = True
    compile_network.compile_network(network, torch.device("cuda"), repeats, sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_inductor_chooses_nothing_by_time_and_the_caller_gets_its_options_back(sharded, inductor, monkeypatch):
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Node

    def options():
        by_time = (inductor.deterministic, inductor.combo_kernels_autotune, inductor.combo_kernel_per_subkernel_blocks)
        launches = inductor.combo_kernels, inductor.force_layout_optimization, inductor.pre_grad_custom_pass
        return *by_time, *launches, inductor.pre_grad_fusion_options, Node.group_algorithm_for_combo_kernels

    before = options()
    with caller_flags_kept():
        set_up(monkeypatch, sharded=sharded)
        assert options()[:3] == (True, 0, False)
        assert inductor.combo_kernels != sharded
    assert options() == before


def test_inductor_may_choose_by_time_where_a_run_may_vary(inductor, monkeypatch):
    set_up(monkeypatch, repeats=False)
    assert not inductor.deterministic
    assert inductor.combo_kernels_autotune
    assert inductor.combo_kernels


@pytest.mark.parametrize("missing", ["_default_group_nodes_for_combo_kernels", "group_algorithm_for_combo_kernels"])
def test_what_needs_another_inductor_is_left_out_with_a_line(missing, inductor, monkeypatch, capsys):
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Node

    monkeypatch.delattr(Node, missing)
    for _ in range(2):
        set_up(monkeypatch)
    assert not inductor.combo_kernels
    assert inductor.deterministic
    [line] = capsys.readouterr().err.splitlines()
    assert "more kernels than usual" in line
    assert missing in line


@pytest.mark.parametrize(("own_groups", "ours"), [("99", True), ("2.0", False)])
def test_kernels_are_grouped_by_inductor_itself_where_it_takes_no_other_groups(own_groups, ours, inductor, monkeypatch):
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Node

    usual = Node.group_algorithm_for_combo_kernels
    set_up(monkeypatch, own_groups=own_groups)
    assert (Node.group_algorithm_for_combo_kernels is not usual) == ours
    assert inductor.combo_kernels


def test_a_schedule_of_another_inductor_is_grouped_as_that_does(inductor, capsys):
    assert compile_network._groups_or_usual(object(), lambda scheduler: [["usual"]]) == [["usual"]]
    assert "more kernels than usual" in capsys.readouterr().err


def test_an_inductor_without_a_deterministic_mode_is_named(monkeypatch, capsys):
    compile_network._say_once.cache_clear()
    older = SimpleNamespace(combo_kernels_autotune=1)
    compile_network._choose_nothing_by_time(older)
    assert vars(older) == {"combo_kernels_autotune": 0}
    assert "may not repeat to the bit" in capsys.readouterr().err
