"""Diffusion: noise levels, what a network predicts, how its error is weighted, how pictures come out of it.

One scalar names a noise level everywhere: `logsnr = log(alpha^2 / sigma^2)` for `x_t = alpha x0 + sigma eps`.
Read in this order: `noise`, `target`, `weighting`, `diffusion` (which joins them), `objective`, `denoiser`,
`sampler`. This layer knows nothing of data sets, of the insides of networks, or of training loops: a network
is any callable `(x [B, C, H, W], c_noise [B], label [B] or None) -> y [B, C, H, W]`.
"""
