"""Diffusion: noise levels, prediction targets, loss weighting and samplers.

One scalar names a noise level everywhere: `logsnr = log(alpha^2 / sigma^2)` for `x_t = alpha x0 + sigma eps`.
Notation of all docstrings: x0 is the clean image, eps ~ N(0, I) the noise, SNR = exp(logsnr), s = sigma / alpha,
u a quantile of the schedule from 0 (clean) to 1 (noisy); alpha', sigma' and s' belong to the next, cleaner level.
Read in this order: `noise`, `target`, `weighting`, `diffusion` (which joins them), `objective`, `denoiser`,
`sampler`. This layer imports no data sets, networks or training loops: a network
is any callable `(x [B, C, H, W], c_noise [B], `Conditions`) -> y [B, C, H, W]`.
"""
