"""`unfog train-autoencoder`: train an autoencoder for later runs on its latents."""

from __future__ import annotations

from unfog.commands.train import report_end
from unfog.config.autoencoder_recipe import add_autoencoder
from unfog.config.paths import check_out
from unfog.config.requests import TrainAutoencoderRequest
from unfog.config.validate import check_autoencoder
from unfog.process.run_folder import RunFolder, next_folder


def train_autoencoder(request: TrainAutoencoderRequest) -> tuple[RunFolder, bool]:
    """Train an autoencoder. Returns and raises as `train`."""
    config = add_autoencoder(
        request.settings.config(request.source),
        request.factor,
        request.channels,
        request.width,
        kl=request.kl,
        pyramid=request.pyramid,
    )
    check_autoencoder(config)
    out = request.out or next_folder(f"{config.source.rstrip('/')}-autoencoder")
    check_out(out, config.source, "the folder of an autoencoder")
    from unfog.runs.train import train as start

    return start(config, out)


def main(request: TrainAutoencoderRequest) -> int:
    """Train, print the folder, and return the exit status."""
    return report_end(*train_autoencoder(request))
