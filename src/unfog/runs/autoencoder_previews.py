"""What the training of a codec looks like from outside: images over what comes back of them, and how near that is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.models.autoencoder import AutoencoderModel
from unfog.pipeline.autoencoder_folder import autoencoder_batch, save_autoencoder
from unfog.pipeline.build import build_loss, build_network
from unfog.pipeline.generate import to_pixels
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder
from unfog.reporting.image_grids import Pixels, grid
from unfog.runs.previews import Previews
from unfog.training.autoencoder_loss import AutoencoderLoss, psnr
from unfog.training.checkpoints import format as checkpoint

_COLUMNS = 8


class AutoencoderPreviews(Previews):
    """As `Looks`, of an autoencoder: nothing is drawn, images are encoded (to the mean) and decoded."""

    closing = "reconstructions"

    def preview(self) -> Pixels:
        """Held-out images, a row of them over a row of what comes back."""
        return self._compared(self.config.preview.images)

    def denoising(self) -> Pixels:
        """The same of more images, for the end."""
        return self._compared(4 * _COLUMNS)

    def held_out_loss(self) -> dict[str, Any]:
        """Error of what comes back of held-out images, as training counts it, and the mean of their PSNR in dB."""
        if self.held_out is None:
            return {}
        x0, loss = self.held_out.x0, build_loss(self.config)
        assert isinstance(loss, AutoencoderLoss)
        back = self._looking(len(x0), lambda count: self._back(x0, count))
        costs = torch.cat([loss.reconstruction(a - b) for a, b in zip(torch.split(x0, 64), torch.split(back, 64))])
        return {"held_out_loss": float(costs.mean()), "psnr": float(psnr(to_pixels(x0), to_pixels(back)).mean())}

    def _compared(self, count: int) -> Pixels:
        if self.held_out is None:
            return np.full((8, 8, 3), 255, np.uint8)  # of so few images none is held out, and there is nothing to show
        x0 = self.held_out.x0[:count]
        back = self._looking(len(x0), lambda count: self._back(x0, count))
        pairs = zip(torch.split(x0, _COLUMNS), torch.split(back, _COLUMNS))
        rows = torch.cat([part for pair in pairs for part in pair])
        return grid(to_pixels(rows).permute(0, 2, 3, 1).cpu().numpy(), columns=min(_COLUMNS, len(x0)))

    @torch.inference_mode()
    def _back(self, x0: Tensor, count: int) -> Tensor:
        """Images encoded and decoded in fp32, `count` at once at most."""
        network = self.state.model
        assert isinstance(network, AutoencoderModel)
        parts = torch.split(x0, min(count, autoencoder_batch(self.config.data.size)))
        return torch.cat([network.decode(network.encode(part)) for part in parts])


def export_autoencoder(folder: RunFolder, config: Config) -> str:
    """Write the average of the newest checkpoint as the codec that others train with; a line that says so."""
    network = build_network(config)
    assert isinstance(network, AutoencoderModel)
    saved = checkpoint.find_checkpoint(folder.checkpoints, None)
    checkpoint.load_weights(saved.folder, "ema", network)
    described = save_autoencoder(folder.path / AUTOENCODER_FOLDER, network)
    measured = "" if saved.held_out_loss is None else f", held-out error {saved.held_out_loss:.4g}"
    made = f"{described.folder} of step {saved.step:,}{measured}"
    return f"  codec     {made}: unfog train SOURCE --autoencoder {folder.path}"
