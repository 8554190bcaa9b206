"""Posterior sampling of inverse problems y = A(x0) + noise, with any denoiser and sampler.

Moment matching posterior sampling (MMPS, Rozet et al. 2024): p(x0 | x_t) is taken as a Gaussian with the mean D, the
denoiser's guess, and the covariance V = sigma^2 / alpha dD/dx_t, which is exact (Tweedie). Then

    E[x0 | x_t, y] = D + V A^T (noise^2 + A V A^T)^-1 (y - A(D)),

which samplers take in place of D. Products with V and A^T are gradients, and conjugate gradients solve the system. For
a Gaussian prior and a linear A this is the exact denoiser of the posterior, without a step size to tune. An A that is
not linear is linearised at D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unfog.diffusion.noise import Path
from unfog.diffusion.sampler import Denoise

_TOLERANCE = 1e-3  # of the residual of conjugate gradients, relative to the first
_ITERATIONS = 5
# sigma / alpha up to which V is that of the level; V of a noisier one is taken from here. V differs little there, while
# its estimate falls apart: sigma^2 / alpha multiplies the error of a gradient that is nearly 0.
_NOISIEST = 3.0


@dataclass(frozen=True, eq=False)
class Observation:
    """Observed values of an image, and the function that measured them."""

    measure: Callable[[Tensor], Tensor]
    """Differentiable: model values [B, C, H, W] -> [B, M]."""
    observed: Tensor
    """y, [M]."""
    variance: Tensor
    """Variance of the noise of each value of y, [M]; at 0, draws repeat y."""
    affine: bool = False
    """True if `measure` is linear but for a constant. It is then differentiated once and not twice."""
    iterations: int = _ITERATIONS
    """Most iterations of conjugate gradients at a level; each calls the network backward, and A in both directions."""

    def posterior(self, denoise: Denoise, path: Path) -> Denoise:
        """Return E[x0 | x_t, y] for the E[x0 | x_t] of `denoise`. Call it without inference mode."""

        def denoise_given(x_t: Tensor, logsnr: Tensor) -> Tensor:
            level = logsnr.clamp_min(-2 * math.log(_NOISIEST))
            alpha, sigma = (_column(part, x_t) for part in path(level))
            with torch.enable_grad():
                x = (x_t * (sigma / _column(path(logsnr)[1], x_t))).detach().requires_grad_()
                guess = denoise(x, level)
                clean = guess if bool((level == logsnr).all()) else denoise(x_t, logsnr)
                x0 = clean.detach().requires_grad_()
                y = self.measure(x0)

            def covariance(v: Tensor) -> Tensor:
                return sigma.square() / alpha * torch.autograd.grad(guess, x, v, retain_graph=True)[0]

            def transposed(v: Tensor) -> Tensor:
                return torch.autograd.grad(y, x0, v, retain_graph=True)[0]

            forward = self._offset_free() if self.affine else _forward(y, x0)
            solved = conjugate_gradients(
                lambda v: self.variance * v + forward(covariance(transposed(v))),
                self.observed - y.detach(),
                self.iterations,
            )
            return x0.detach() + covariance(transposed(solved))

        return denoise_given

    def _offset_free(self) -> Callable[[Tensor], Tensor]:
        """Return the linear part of an affine measurement."""

        def forward(v: Tensor) -> Tensor:
            # At size 1, as the difference of a small change from the constant would be rounding errors.
            size = v.abs().amax((1, 2, 3), keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
            return (self.measure(v / size) - self.measure(torch.zeros_like(v))) * size[:, :, 0, 0]

        return forward


def _column(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x)[:, None, None, None]


def _forward(y: Tensor, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function v -> dy/dx v, as the gradient of a gradient; y [B, M] is differentiable by x [B, C, H, W]."""
    with torch.enable_grad():
        probe = torch.zeros_like(y, requires_grad=True)
        back = torch.autograd.grad(y, x, probe, create_graph=True)[0]
    return lambda v: torch.autograd.grad(back, probe, v, retain_graph=True)[0]


def conjugate_gradients(apply: Callable[[Tensor], Tensor], b: Tensor, iterations: int) -> Tensor:
    """Solve apply(u) = b for each row of b [B, M]; `apply` is symmetric and positive definite.

    A row ends at its tolerance, and where the operator, an approximation of a network, is not positive.
    """
    u, r, p = torch.zeros_like(b), b, b
    rr = first = b.square().sum(1)
    active = torch.ones_like(rr, dtype=torch.bool)
    for _ in range(iterations):
        image = apply(p)
        curvature = (p * image).sum(1)
        active = active & (curvature > 0) & (rr > _TOLERANCE**2 * first)
        if not bool(active.any()):
            break
        step = torch.where(active, rr / curvature, 0)[:, None]
        u, r = u + step * p, r - step * image
        before, rr = rr, r.square().sum(1)
        p = r + torch.where(active, rr / before, 0)[:, None] * p
    return u
