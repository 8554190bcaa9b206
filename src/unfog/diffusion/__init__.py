"""Diffusion: noise levels, prediction targets, loss weighting and samplers.

One scalar names a noise level everywhere: `logsnr = log(alpha^2 / sigma^2)` for `x_t = alpha x0 + sigma eps`.
Read in this order: `noise`, `target`, `weighting`, `diffusion` (which joins them), `objective`, `denoiser`,
`sampler`. This layer imports no data sets, networks or training loops: a network
is any callable `(x [B, C, H, W], c_noise [B], `Conditions`) -> y [B, C, H, W]`.
"""
