"""Optimisers: AdamW, Muon with AdamW, and any other by its path; and their state, by the names of weights."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfog.errors import RequestError
from unfog.training.ema import lerp_unless
from unfog.training.settings import Custom, Muon, Optimizer
from unfog.training.sharded_tensors import is_sharded, to_local

# Of the quintic whose iteration brings singular values near to one the fastest (Jordan et al. 2024).
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def build_optimizer(model: nn.Module, settings: Optimizer, fast: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return the optimiser of a network's parameters; Muon iterates in `fast`, for which bfloat16 suffices.

    RequestError if the optimiser cannot be built, or its state cannot be saved.
    """
    method = settings.method
    if isinstance(method, Custom):
        return build_custom(method, _sharded_first(model), settings.lr)
    if isinstance(method, Muon):
        return _build_muon(model, settings, method, fast)
    return _build_adamw(_sharded_first(model), settings)


def _sharded_first(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, sharded ones first: torch's loss scaler looks at the first to handle all of them."""
    return sorted(model.parameters(), key=lambda p: not is_sharded(p))


def _build_adamw(parameters: list[nn.Parameter], settings: Optimizer) -> torch.optim.AdamW:
    # A fused one refuses parameters on "meta", whose values come later.
    fused = not any(p.is_meta for p in parameters)
    betas, eps, decay = settings.betas, settings.eps, settings.weight_decay
    # On CUDA the rate is on the device, where a captured step finds that of each replay.
    on_device = bool(parameters) and all(p.device.type == "cuda" and not is_sharded(p) for p in parameters)
    lr = torch.full((), settings.lr, device=parameters[0].device) if on_device else settings.lr
    return torch.optim.AdamW(parameters, lr, betas, eps, decay, fused=fused, capturable=on_device)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, without waiting for a device that it is on."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def can_be_masked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step changes nothing if `found_inf`, an attribute of the optimiser, is 1 on the device."""
    return isinstance(optimizer, torch.optim.AdamW | MuonAdamW) and bool(optimizer.param_groups[-1]["fused"])


def _build_muon(model: nn.Module, settings: Optimizer, muon: Muon, fast: torch.dtype) -> MuonAdamW:
    matrices, others = split_for_muon(model)
    return MuonAdamW(matrices, _build_adamw(others, settings), muon.momentum, muon.rounds, fast)


def split_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices for Muon, and all other parameters for AdamW.

    Vectors go to AdamW, also those with sides of 1 such as the gains [1, C, 1, 1] of a norm: with one row or column,
    Muon's update would be the normalised gradient. So do embeddings, which are tables, and parameters that the network
    names in `not_matrices`, by their own name or that of a module around them. So do the network's first and last
    layer, whose rows or columns are not those of a hidden space: the layers that it names as its `ends`, or else its
    first and last matrix.
    """
    tables = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters(False)}
    others = {*getattr(model, "not_matrices", ())}
    found = [
        (name, p)
        for name, p in model.named_parameters()
        if _is_matrix(p) and id(p) not in tables and others.isdisjoint(name.split("."))
    ]
    named = tuple(f"{end}." for end in getattr(model, "ends", ()))  # with the dot, as one name may begin another
    # Most networks are built in the order of their layers.
    ends = [part for part in found if f"{part[0]}.".startswith(named)] or [*found[:1], *found[-1:]]
    matrices = {id(p) for _, p in found} - {id(p) for _, p in ends}
    of = _sharded_first(model)
    return [p for p in of if id(p) in matrices], [p for p in of if id(p) not in matrices]


def _is_matrix(p: Tensor) -> bool:
    """Return whether a parameter, as the matrix [out, in k k], has rows and columns."""
    return p.ndim >= 2 and 1 < len(p) < p.numel()


def build_custom(method: Custom, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return the optimiser of a dotted path, after two steps with it on small tensors.

    RequestError if it does not exist, refuses the arguments, cannot step, or has state that cannot be saved.
    """
    kind: Callable[..., torch.optim.Optimizer] = method.load()
    keywords = method.keywords()
    if torch.optim.Optimizer not in getattr(kind, "__mro__", ()):
        raise RequestError(f"path = {method.path!r} is not a torch.optim.Optimizer; name a class that is")
    with torch.random.fork_rng(devices=[]):  # a trial must not change the random numbers of the run
        toys = _toy_parameters()
        try:
            tried = kind(list(toys), lr=lr or 1e-3, **keywords)  # 0 stands for a rate that is chosen later
            for _ in range(2):
                _step_once(tried, toys)
        except Exception as error:  # foreign code may raise anything
            raise RequestError(f"{method.path} cannot be used as an optimiser: {error}") from error
    kept = {key for state in tried.state.values() for key, value in state.items() if not _is_storable(value)}
    if kept:
        raise RequestError(f"{method.path} keeps {min(kept)}, which no checkpoint can hold; choose another optimiser")
    return kind(parameters, lr=lr, **keywords)


def _toy_parameters() -> nn.ParameterList:
    """Return a kernel, a matrix and a bias."""
    # Optimisers may treat each of these in a way of its own.
    return nn.ParameterList([torch.ones(4, 2, 3, 3), torch.ones(4, 8), torch.ones(4)])


def _step_once(optimizer: torch.optim.Optimizer, toys: nn.ParameterList) -> None:
    """Take one step with a gradient of 0.1, and the learning rate set as the loop sets it."""
    set_learning_rate(optimizer, 1e-3)
    for toy in toys:
        toy.grad = torch.full_like(toy, 0.1)
    optimizer.step()


def check_resumable(method: Custom) -> None:
    """RequestError unless an optimiser resumes from a checkpoint to the bit, or if it cannot be used at all."""
    toys = _toy_parameters()
    with torch.random.fork_rng(devices=[]):
        one = build_custom(method, list(toys), 1e-3)
        for _ in range(2):
            _step_once(one, toys)
        again = copy.deepcopy(toys)
        other = build_custom(method, list(again), 1e-3)
        load_optimizer_state(other, again, optimizer_tensors(one, toys), optimizer_numbers(one, toys))
        for optimizer, of in ((one, toys), (other, again)):
            torch.manual_seed(0)  # as the loop does, so that an optimiser with noise of its own passes
            _step_once(optimizer, of)
    if not all(torch.equal(p, q) for p, q in zip(toys, again)):
        raise RequestError(
            f"{method.path} keeps something outside its state, which no checkpoint can hold; choose another optimiser"
        )


def _is_storable(value: object) -> bool:
    """Return whether a checkpoint can hold a value: a tensor, a list of tensors, a number, or None."""
    if isinstance(value, list | tuple):
        return all(isinstance(item, Tensor) for item in value)
    return value is None or isinstance(value, Tensor | bool | int | float)


def _iter_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield ("moment/parameter", value) of all state; items of a list as "moment.0/parameter", "moment.1/parameter"…"""
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, list | tuple):
                yield from ((f"{key}.{i}/{name}", item) for i, item in enumerate(value))
            else:
                yield f"{key}/{name}", value


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an optimiser's state, by "moment/parameter"."""
    return {name: value for name, value in _iter_state(optimizer, model) if isinstance(value, Tensor)}


def optimizer_numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the other state for JSON: numbers by parameter, and group settings that steps changed."""
    found = {name: value for name, value in _iter_state(optimizer, model) if not isinstance(value, Tensor)}
    for i, group in enumerate(optimizer.param_groups):
        for key, usual in optimizer.defaults.items():
            value = group.get(key)
            # The loop sets the learning rate anew in every step.
            if key != "lr" and isinstance(value, int | float) and value != usual:
                found[f"/{i}/{key}"] = value
    # JSON has no infinity.
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}


def _format_beside(parameter: Tensor, moment: Tensor) -> torch.memory_format:
    """Return the memory format of a moment: that of its parameter, as fused optimisers need."""
    alike = moment.shape == parameter.shape and moment.dim() == 4 and not parameter.is_contiguous()
    return torch.channels_last if alike else torch.preserve_format


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Any],
    copies: bool = True,
) -> None:
    """Restore the values of `optimizer_tensors` and `optimizer_numbers`, copied unless `copies` is False.

    ValueError if they are of another network.
    """
    # A state dict of torch numbers the parameters in the order of the groups.
    held = (id(p) for group in optimizer.param_groups for p in group["params"])
    order = {parameter: place for place, parameter in enumerate(held)}
    parameters = dict(model.named_parameters())
    places = {name: order[id(p)] for name, p in parameters.items() if id(p) in order}
    state: dict[int, dict[str, Any]] = {}
    lists: dict[tuple[int, str], dict[int, Any]] = defaultdict(dict)
    groups = optimizer.state_dict()["param_groups"]  # the current settings, not the saved ones
    for full, value in {**tensors, **others}.items():
        key, _, name = full.partition("/")
        value = float(value) if isinstance(value, str) else value  # JSON holds infinity as text
        if not key:
            i, _, setting = name.partition("/")
            if setting not in optimizer.defaults or isinstance(value, Tensor):
                raise ValueError(f"{full} is not a setting of the optimiser")
            groups[int(i)][setting] = value
            continue
        if name not in places:
            raise ValueError(f"{full} is of no parameter of the network")
        # A copy, because the tensor may be memory-mapped from the file.
        if isinstance(value, Tensor) and copies:
            value = value.clone(memory_format=_format_beside(parameters[name], value))
        plain, dot, number = key.rpartition(".")
        if dot and number.isdigit():
            lists[places[name], plain][int(number)] = value
        else:
            state.setdefault(places[name], {})[key] = value
    for (place, key), items in lists.items():
        state.setdefault(place, {})[key] = [items[i] for i in sorted(items)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


class MuonAdamW(torch.optim.Optimizer):
    """Muon (momenta orthogonalised by Newton-Schulz iteration) for matrices and kernels, AdamW for the others.

    One optimiser, so that the loss scaler, skipped steps and roll-backs treat both the same. A kernel [out, in, k, k]
    is the matrix [out, in k k]. Matrices of one shape are stacked. As in torch's fused optimisers, a step changes
    nothing if the attribute `found_inf`, 0-d on the device, is 1.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[nn.Parameter],
        adamw: torch.optim.AdamW,
        momentum: float,
        rounds: int,
        fast: torch.dtype = torch.float32,
    ):
        self.fast, self._adamw = fast, adamw
        usual = {name: adamw.param_groups[0][name] for name in ("lr", "weight_decay")}
        super().__init__([{"params": matrices}, *adamw.param_groups], {**usual, "momentum": momentum, "rounds": rounds})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. The moment of a layer that the other optimiser trained before is left out, and begins anew."""
        matrices = len(self.param_groups[0]["params"])
        moments = state_dict["state"].items()
        fitting = {i: held for i, held in moments if ("momentum_buffer" in held) == (i < matrices)}
        super().load_state_dict(state_dict | {"state": fitting})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step with both optimisers. `closure` is not supported."""
        assert closure is None
        group, skip = self.param_groups[0], self.found_inf
        by_shape: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[len(p), p.numel() // len(p)].append(p)
        for (rows, columns), parameters in by_shape.items():
            updates = self._directions(parameters, rows, columns, group["momentum"], group["rounds"])
            moved, shrink = list(map(to_local, parameters)), 1 - group["lr"] * group["weight_decay"]
            far = -group["lr"] * 0.2 * math.sqrt(max(rows, columns))  # AdamW's steps have a root mean square of 0.2 lr
            if skip is not None:
                # Times 1, and plus -0: neither changes a bit.
                shrink, updates = torch.where(skip > 0, 1.0, shrink), updates.masked_fill_(skip > 0, 0.0)
            if isinstance(far, Tensor):  # which foreach takes no `alpha` from
                updates, far = updates * far, 1.0
            torch._foreach_mul_(moved, shrink)
            torch._foreach_add_(moved, [_from_matrix(u, p) for u, p in zip(updates, moved)], alpha=far)
        # Loading a state dict replaces groups and state, so AdamW gets them anew each time.
        self._adamw.param_groups, self._adamw.state = self.param_groups[1:], self.state
        cast(Any, self._adamw).found_inf = skip
        self._adamw.step()

    def _directions(self, parameters: list[Tensor], rows: int, columns: int, momentum: float, rounds: int) -> Tensor:
        """Return the orthogonalised Nesterov momenta [N, rows, columns], or this rank's rows of them."""
        gradients = [to_local(p.grad) for p in parameters if p.grad is not None]
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [to_local(self.state[p]["momentum_buffer"]) for p in parameters]
        if self.found_inf is None:
            torch._foreach_lerp_(means, gradients, 1 - momentum)
        else:
            lerp_unless(self.found_inf, means, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, means, momentum)
        stacked = torch.stack([_as_matrix(a) for a in ahead])
        work, fast = partial(_orthogonalize, rounds=rounds), stacked.to(self.fast)
        made = _map_full_matrices(fast, rows, work) if is_sharded(parameters[0]) else work(fast)
        return made.to(stacked.dtype)


def _as_matrix(tensor: Tensor) -> Tensor:
    """View a tensor [out, ...] as the matrix [out, all other], with the columns in the order in which they lie."""
    return (tensor.permute(0, 2, 3, 1) if _is_channels_last(tensor) else tensor).flatten(1)


def _from_matrix(matrix: Tensor, like: Tensor) -> Tensor:
    """View a matrix as the tensor that `_as_matrix` made it of."""
    if not _is_channels_last(like):
        return matrix.view_as(like)
    out, channels, *kernel = like.shape
    return matrix.view(out, *kernel, channels).permute(0, 3, 1, 2)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _orthogonalize(x: Tensor, rounds: int = 5) -> Tensor:
    """Set the singular values of matrices [N, R, C] to about one, by Newton-Schulz iteration.

    X <- a X + (b X X' + c (X X')^2) X, begun at X / |X|, where no singular value is above one (Jordan et al. 2024).
    """
    a, b, c = _NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _map_full_matrices(shards: Tensor, rows: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of full matrices [1, rows, C] to matrices that are sharded by rows. A collective.

    `shards` and the results are [N, R, C], this rank's rows of each matrix.
    """
    # Each matrix is gathered on one rank only, so that the ranks share the work.
    size, (count, mine, columns) = dist.get_world_size(), shards.shape
    results, share = torch.empty_like(shards), -(-rows // size)
    for first in range(0, count, size):
        some = shards[first : first + size]
        sent = shards.new_zeros(size, share, columns)
        sent[: len(some), :mine] = some
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        if dist.get_rank() < len(some):
            matrix = received.view(-1, columns)[:rows]
            matrix.copy_(function(matrix[None])[0])
        dist.all_to_all_single(sent, received)
        results[first : first + size] = sent[: len(some), :mine]
    return results
