"""The smallest network of each kind that has an attention layer, for tests to which its size does not matter."""

from unfog.models.settings import DiT, MPUNet, UNet

NETWORKS = {
    "unet": UNet(channels=(8, 16), attention=(False, True), blocks=1, norm_groups=4, head_channels=8),
    "mpunet": MPUNet(channels=(8, 16), attention=(False, True), blocks=1, head_channels=8),
    "dit": DiT(width=32, depth=1, head_channels=8, patch=2),
}
