"""Optimisers: Muon against its definition and torch's own, moments that come back to the bit, code by its path."""

import copy
import math
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import unfog
from conftest import NETWORK, advance
from unfog.config.presets import preset
from unfog.config.schema import Network, nest_settings
from unfog.config.spec_strings import format_spec, parse_spec, registry_of
from unfog.errors import RequestError
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES, DdpmPytorch, DiffusersDiT, Edm, Edm2
from unfog.models.unet import UNetModel
from unfog.planning.memory_estimate import MemoryEstimator, checkpoint_bytes, persistent_bytes
from unfog.planning.microbatch import with_precision
from unfog.training import optimizers as optim  # an update is computed by itself
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.load import load_checkpoint, roll_back
from unfog.training.precision import Precision
from unfog.training.settings import AdamW, Custom, Muon, Optimizer, OptimizerKind, PowerEma, Training
from unfog.training.state import TrainState
from unfog.values.condition_format import ConditionFormat

CPU = torch.device("cpu")
MOMENTUM = Custom("torch.optim.RMSprop", ("momentum=0.9", "centered=True"))
ODD = '''
import torch

class Odd(torch.optim.Optimizer):
    """Keeps a list, a number and a group's own counter, as some optimisers do."""

    def __init__(self, params, lr, strength=1.0):
        super().__init__(params, {"lr": lr, "strength": strength, "count": 0, "spread": 1.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            group["spread"] *= 0.5
            for p in group["params"]:
                held = self.state[p]
                held.setdefault("sides", [torch.zeros_like(p) for _ in range(12)])
                held.setdefault("taken", 0)
                held["taken"] += 1
                held["sides"][held["taken"] % 12] += p.grad * held["taken"]
                p -= group["lr"] * group["strength"] * group["spread"] * sum(held["sides"]) / group["count"]

class Forgetful(torch.optim.SGD):
    def step(self):
        super().step()
        self.state[self.param_groups[0]["params"][0]]["how"] = "text"
'''


@pytest.fixture
def odd(tmp_path, monkeypatch):
    (tmp_path / "odd_optimisers.py").write_text(ODD)
    monkeypatch.syspath_prepend(tmp_path)
    return Custom("odd_optimisers.Odd", ("strength=2.0",))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(),
        nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1),
    )  # fmt: skip


ADAMW = AdamW()


def state(method: OptimizerKind = ADAMW, precision="fp32", **settings) -> TrainState:
    optimizer = Optimizer(**{"lr": 1e-2, "method": method, **settings})
    return TrainState(network(), optimizer, PowerEma(), Precision(precision, CPU))


def step(into: TrainState, bad: bool = False) -> None:
    generator = torch.Generator().manual_seed(into.seen)
    x = torch.randn(4, 1, 6, 6, generator=generator)
    loss = (into.model(x) - x).square().mean() * (math.nan if bad else 1)
    into.precision.backward(loss)
    norm = into.precision.gradient_norm(into.optimizer).item()
    accepted = math.isfinite(norm)
    into.precision.update(into.optimizer, 1.0, norm, accepted)
    into.optimizer.zero_grad()
    advance(into, 4, accepted, [])


def everything(of: TrainState) -> dict[str, torch.Tensor]:
    return {f"{file}/{name}": t.clone() for file, part in of.tensors().items() for name, t in part.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("shape", [(3, 5, 9), (2, 9, 5), (1, 4, 4)])
def test_orthogonalised_applies_its_polynomial_to_the_singular_values(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    a, b, c = optim._NEWTON_SCHULZ
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(optim._orthogonalize(x, 5), u @ s.diag_embed() @ vt, rtol=1e-10, atol=1e-12)
    assert s.min() > 0.6
    assert s.max() < 1.25


def test_muon_moves_matrices_and_kernels_as_torch_does():
    torch.manual_seed(1)
    shapes = [(6, 8), (6, 8), (8, 3, 3, 3), (12, 4)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().reshape(len(p), -1).clone()) for p in ours]
    rest = nn.Parameter(torch.randn(5))
    settings = Optimizer(lr=0.02, weight_decay=0.1, method=Muon())
    mine = optim.MuonAdamW(ours, optim._build_adamw([rest], settings), 0.95, 5, torch.bfloat16)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    begun = [p.detach().clone() for p in theirs]
    for _ in range(3):
        rest.grad = torch.randn(5)
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.reshape(b.shape).clone()
        mine.step()
        reference.step()
    for a, b, at_first in zip(ours, theirs, begun):
        moved = (b - at_first).norm()
        assert (a.detach().reshape(b.shape) - b).norm() < 0.01 * moved  # bfloat16 rounds in another order


def test_muon_moves_as_far_as_adamw_and_leaves_the_rest_to_it():
    torch.manual_seed(0)
    model = UNetModel(SIZES["tiny"], 1, ConditionFormat.numbered(10, 9))
    matrices, others = optim.split_for_muon(model)
    names = {id(p): name for name, p in model.named_parameters()}
    apart = {names[id(p)] for p in others if p.ndim >= 2}
    assert apart == {"conv_in.weight", "conv_out.weight", "class_embedding.weight", "augment_embedding.weight"}
    assert all(p.ndim >= 2 for p in matrices)
    assert len(matrices) + len(others) == len(list(model.parameters()))
    twin = copy.deepcopy(model)
    begun = {name: p.detach().clone() for name, p in model.named_parameters()}
    for net, method in ((model, Muon()), (twin, AdamW())):
        optimizer = optim.build_optimizer(net, Optimizer(lr=1e-3, method=method))
        generator = torch.Generator().manual_seed(0)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        if name in apart or p.ndim < 2:
            assert torch.equal(p, q), name
        elif p.numel() > 1000:
            moved = (p.detach() - begun[name]).square().mean().sqrt().item()
            # Root mean square of 0.2 lr by the rule, within what the iteration leaves of singular values.
            assert 0.12e-3 < moved < 0.25e-3


@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize("name", ["tiny", "mp-tiny", "dit-tiny"])
def test_muon_leaves_the_ends_of_every_network_and_nothing_else(name, channels):
    """Also where a hidden width is that of latents, or twice that, and where a told augmentation comes last."""
    model = build_model(SIZES[name], channels, ConditionFormat.numbered(10, 9), 2 * channels)
    held = {id(p) for p in optim.split_for_muon(model)[1]}
    ends = {"class_embedding", "augment_embedding"} | set(
        ("patch_in", "patch_out") if name == "dit-tiny" else ("conv_in", "conv_out")
    )
    assert {n.partition(".")[0] for n, p in model.named_parameters() if p.ndim >= 2 and id(p) in held} == ends


@pytest.mark.parametrize(
    "settings",
    [
        *(kind(8, mults=(1,), attention=(False,)) for kind in (DdpmPytorch, Edm2)),
        Edm("ddpmpp", 8, (1,), 1, (False,)),
        DiffusersDiT(8, 1, 8),
    ],
    ids=lambda settings: settings.kind,
)
def test_muon_leaves_the_ends_of_the_networks_of_other_programs(settings):
    model = build_model(settings, 3, ConditionFormat.numbered(10, 9))
    held = {id(p) for p in optim.split_for_muon(model)[1]}
    named = [(n, p) for n, p in model.named_parameters() if id(p) in held and not n.endswith("mem_kv")]
    ends = {n.removesuffix(".weight") for n, p in named if p.ndim >= 2 and 1 < len(p) < p.numel()}
    assert ends == {*model.ends} - {"column_embedding"}


def test_muon_leaves_the_first_and_the_last_matrix_of_any_other_network():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Embedding(5, 4), nn.Linear(4, 3))
    matrices, _ = optim.split_for_muon(model)
    assert [p.shape for p in matrices] == [(4, 4)]
    assert matrices[0] is model[1].weight


@pytest.mark.slow
@pytest.mark.parametrize("method", [AdamW(), Muon(), MOMENTUM, Custom("torch.optim.Adafactor"), "odd"])
def test_saved_and_restored_in_the_middle_is_bit_identical(tmp_path, method, odd):
    method = odd if method == "odd" else method
    straight, first, second = state(method), state(method), state(method)
    for _ in range(3):
        step(straight)
        step(first)
    folder = snapshot.write_checkpoint(snapshot.take_snapshot(first, 3), tmp_path / "checkpoints")
    load_checkpoint(folder, second)
    assert same(everything(second), everything(straight))
    for _ in range(14):  # past the twelve of `Odd`
        step(straight)
        step(second)
    assert same(everything(second), everything(straight))
    assert second.progress()["optimizer"] == straight.progress()["optimizer"]


def test_roll_back_returns_the_moments_of_both(tmp_path):
    into = state(Muon())
    step(into)
    saved, folder = (
        everything(into),
        snapshot.write_checkpoint(snapshot.take_snapshot(into, 1), tmp_path / "checkpoints"),
    )
    for _ in range(3):
        step(into)
    assert not same(everything(into), saved)
    roll_back(folder, into)
    assert same(everything(into), saved)
    kinds = {name.partition("/")[0] for name in into.tensors()["optimizer"]}
    assert kinds == {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_refused_step_leaves_weights_and_moments_of_both(precision):
    into = state(Muon(), precision)
    while into.updates < 2:  # fp16 begins with a scale that overflows
        step(into)
    before, scale = everything(into), into.precision.scale
    step(into, bad=True)
    assert same(everything(into), before)
    assert into.precision.scale == (scale / 2 if precision == "fp16" else 1)
    step(into)
    assert not same(everything(into), before)
    assert into.non_finite() is None


def test_a_layer_that_is_an_end_only_now_begins_its_own_moment():
    def built(ends):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        model.ends = ends
        return model, optim.build_optimizer(model, Optimizer(method=Muon()))

    def steps(model, optimizer):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        return optim.optimizer_tensors(optimizer, model)

    before = steps(*built(("1", "2")))
    model, optimizer = built(("0", "2"))
    optim.load_optimizer_state(optimizer, model, before, {})
    kept = optim.optimizer_tensors(optimizer, model)
    assert kept.keys() == {n for n in before if n.endswith("2.weight")}
    assert "exp_avg/0.weight" in steps(model, optimizer)


def test_another_optimiser_on_resume_begins_its_own_moments(tmp_path):
    before, after = state(), state(Muon())
    step(before)
    load_checkpoint(snapshot.write_checkpoint(snapshot.take_snapshot(before, 1), tmp_path / "checkpoints"), after)
    assert after.tensors()["optimizer"] == {}
    assert same(after.tensors()["model"], before.tensors()["model"])
    step(after)
    assert after.non_finite() is None


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        ("", (), "must name a module and an optimiser in it"),
        ("RMSprop", (), "must name a module"),
        ("nosuch.module.Best", (), "cannot be imported: No module named 'nosuch'"),
        ("torch.optim.Best", (), "cannot be imported"),
        ("os.system", (), "is not a torch.optim.Optimizer"),
        ("torch.nn.Linear", (), "is not a torch.optim.Optimizer"),
        ("torch.optim.RMSprop", ("alpha",), "not a keyword argument; write it as alpha=0.9"),
        ("torch.optim.RMSprop", ("alpha=__import__('os')",), "not a keyword argument"),
        ("torch.optim.RMSprop", ("sharpness=1",), "cannot be used as an optimiser"),
        ("torch.optim.LBFGS", (), "cannot be used as an optimiser"),
        ("torch.optim.Muon", (), "cannot be used as an optimiser"),
        ("odd_optimisers.Forgetful", (), "keeps how, which no checkpoint can hold"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_line(odd, path, arguments, said):
    with pytest.raises(RequestError, match=said):
        state(Custom(path, arguments))


def test_what_cannot_be_imported_is_refused_before_images_are_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("unfog.runs.train.load_images", lambda *given: pytest.fail("images were read"))
    for path, said in (("", "must name a module"), ("nosuch.module.Best", "No module named 'nosuch'")):
        with pytest.raises(RequestError, match=said):
            unfog.train("fashion", out=tmp_path / "run", steps=1, optimizer={"method": Custom(path)})
    assert "imports and runs nosuch.module.Best" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_trying_an_optimiser_out_leaves_the_random_numbers_alone(odd):
    before = torch.get_rng_state()
    optim.build_optimizer(nn.Linear(2, 2, bias=False), Optimizer(lr=1e-3, method=odd))
    drawn = torch.get_rng_state()
    torch.set_rng_state(before)
    nn.Linear(2, 2, bias=False)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_optimisers_by_word_and_by_table():
    words = registry_of(OptimizerKind)
    assert parse_spec(words, "muon:momentum=0.9") == Muon(momentum=0.9)
    text = "custom:path=torch.optim.RMSprop,arguments=alpha=0.9/momentum=0.5"
    assert parse_spec(words, text) == Custom("torch.optim.RMSprop", ("alpha=0.9", "momentum=0.5"))
    assert format_spec(parse_spec(words, text)) == text
    assert nest_settings({"optimizer": "muon", "lr": 1e-3}) == {"optimizer": {"method": "muon", "lr": 1e-3}}
    assert nest_settings({"optimizer": {"method": "muon"}}) == {"optimizer": {"method": "muon"}}
    for wrong in ("muon:momentum=1", "muon:rounds=0"):
        with pytest.raises(RequestError):
            parse_spec(words, wrong)


def test_cooldown_stays_and_then_falls_to_zero_as_one_minus_root():
    settings = Optimizer(lr=2.0, warmup=10, schedule="cooldown", cooldown=0.25)
    rates = [settings.learning_rate(n, 200) for n in range(200)]
    assert rates[9:151] == [2.0] * 142
    for n in range(150, 200):
        assert rates[n] == pytest.approx(2 * (1 - math.sqrt((n - 150) / 50)))
    assert 0 < rates[-1] < 0.03
    assert all(a > b for a, b in pairwise(rates[150:]))
    # Longer than what the warm-up leaves: it begins where that ends.
    whole = Optimizer(lr=1.0, warmup=10, schedule="cooldown", cooldown=1.0)
    assert whole.learning_rate(10, 20) == 1.0
    assert whole.learning_rate(15, 20) == pytest.approx(1 - math.sqrt(0.5))
    for wrong in (0.0, -0.1, 1.1):
        with pytest.raises(RequestError, match="cooldown"):
            Optimizer(cooldown=wrong)


def test_a_constant_run_branches_into_a_cooldown_at_its_new_end():
    constant = Optimizer(lr=1.0, warmup=10, schedule="constant")
    branch = Optimizer(lr=1.0, warmup=10, schedule="cooldown", cooldown=0.2)
    # 100 steps are done; the end is at 125 now: the last 25 fall, and what lies behind was as the branch has it.
    assert [branch.learning_rate(n, 125) for n in range(101)] == [constant.learning_rate(n, 100) for n in range(101)]
    assert branch.learning_rate(101, 125) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "copies"), [(Muon(), 1), (MOMENTUM, 3), (Custom("torch.optim.Adafactor"), 2)])
def test_plan_counts_the_moments_that_there_are(method, copies):
    """And takes AdamW's for an optimiser that looks at values, as Adafactor does."""
    config = replace(preset("default"), network=parse_spec(registry_of(Network), NETWORK))
    config = replace(config, data=replace(config.data, size=8, channels=1), training=Training(batch=1))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-3, method=method))
    step = MemoryEstimator(with_precision(config), "cpu").step(1, False)
    assert step.parts["moments"] / step.parts["parameters"] == pytest.approx(copies, abs=0.1)
    assert step.parts["average"] == pytest.approx(2 * step.parts["parameters"], rel=0.01)
    assert persistent_bytes(step) + 3 * step.parts["parameters"] == checkpoint_bytes(step)


class Counting(torch.optim.SGD):
    """Keeps what it has learned where no checkpoint looks."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.1 / self.taken
        return super().step(closure)


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "NAdam", "RAdam", "ASGD", "Rprop", "Adagrad", "Adafactor"])
def test_optimisers_of_torch_are_known_to_go_on_to_the_bit(name):
    optim.check_resumable(Custom(f"torch.optim.{name}"))


def test_one_that_no_checkpoint_can_bring_back_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "counting", type(sys)("counting"))
    sys.modules["counting"].Counting = Counting
    with pytest.raises(RequestError, match="keeps something outside its state"):
        optim.check_resumable(Custom("counting.Counting"))


def test_other_arguments_begin_moments_of_their_own():
    """RMSprop without momentum has no buffer that one with momentum could go on from."""
    plain, heavy = Custom("torch.optim.RMSprop"), Custom("torch.optim.RMSprop", ("momentum=0.9",))
    before, after = state(plain), state(heavy)
    step(before)
    after.load_optimizer(before.tensors()["optimizer"], before.progress())
    step(after)
    assert after.non_finite() is None
    assert plain.identity == Custom("torch.optim.RMSprop").identity != heavy.identity


def test_gains_of_norms_and_learned_keys_are_no_matrices_for_muon():
    torch.manual_seed(0)
    network = build_model(DdpmPytorch(width=16, mults=(1, 2), attention=(False, True)), 3, ConditionFormat.numbered(4))
    matrices = optim.build_optimizer(network, Optimizer(method=Muon())).param_groups[0]["params"]
    chosen = {id(p) for p in matrices}
    names = {name for name, p in network.named_parameters() if id(p) in chosen}
    assert not [name for name in names if name.endswith((".g", "mem_kv"))]
    assert all(min(len(p), p.numel() // len(p)) > 1 for p in matrices)
    assert sum("to_qkv" in name for name in names) == sum("to_qkv" in name for name, _ in network.named_parameters())


class Own(nn.Module):
    """Without `ends`: the first and last matrix are, which a gain beside them is not."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.keys = nn.Parameter(torch.randn(2, 3, 4))
        self.layers = nn.Sequential(*(nn.Conv2d(4, 4, 1, bias=False) for _ in range(3)))
        self.single = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.single(self.layers(x * self.gain)) + self.keys.sum()


def test_a_network_names_what_is_no_matrix_and_a_run_from_before_resumes():
    def steps(model, optimizer):
        model(torch.ones(2, 4, 2, 2)).square().sum().backward()
        optimizer.step()
        return optim.optimizer_tensors(optimizer, model)

    def chosen(model):
        ids = {id(p) for p in optim.build_optimizer(model, Optimizer(method=Muon())).param_groups[0]["params"]}
        return {name for name, p in model.named_parameters() if id(p) in ids}

    model = Own()
    assert chosen(model) == {"layers.0.weight", "layers.1.weight"}  # the keys come first
    model.not_matrices = ("keys",)
    assert chosen(model) == {"layers.1.weight"}
    model.not_matrices = ("keys", "layers")
    assert chosen(model) == set()

    before = Own()
    earlier = optim.build_optimizer(before, Optimizer(method=Muon()))
    saved = steps(before, earlier) | {"momentum_buffer/gain": torch.ones(1, 4, 1, 1)}
    saved = {name: value for name, value in saved.items() if not name.startswith("exp_avg") or "gain" not in name}
    saved = {name: value for name, value in saved.items() if name not in ("step/gain", "exp_avg_sq/gain")}
    now = Own()
    optimizer = optim.build_optimizer(now, Optimizer(method=Muon()))
    optim.load_optimizer_state(optimizer, now, saved, {})
    assert "momentum_buffer/gain" not in optim.optimizer_tensors(optimizer, now)
    after = steps(now, optimizer)
    assert "exp_avg/gain" in after
    assert after.keys() >= {"momentum_buffer/layers.1.weight"}
