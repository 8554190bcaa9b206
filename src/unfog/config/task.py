"""Tasks of a run: train a diffusion model, or an autoencoder for the latents of other runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from unfog.errors import RequestError


class Task(ABC):
    """Facts about a kind of training. `pipeline.build` and `runs.previews` hold the parts that need torch."""

    chooses_network: ClassVar[bool]
    """True if the network is a setting. Automatic batch and compilation follow measurements of these networks."""
    generates: ClassVar[bool]
    """True if the trained network generates images from noise, so that there are noise levels to check."""
    next_command: ClassVar[str]
    """Command to give a finished run to, without its folder."""
    one_size: ClassVar[str]
    """Reason why images of several sizes cannot be trained on, and what to do; "" if they can."""

    @abstractmethod
    def check_generates(self, run: str, remedy: str) -> None:
        """Raise RequestError if the result of this training cannot generate images; `run` names it in the message."""


class DiffusionTask(Task):
    """Train a network that generates images."""

    chooses_network = generates = True
    next_command = "sample"
    one_size = ""

    def check_generates(self, run: str, remedy: str) -> None:
        pass


class AutoencoderTask(Task):
    """Train an autoencoder, by `unfog train-autoencoder`."""

    chooses_network = generates = False
    next_command = "train SOURCE --autoencoder"
    one_size = "an autoencoder is trained on images of one size; omit --aspect"

    def check_generates(self, run: str, remedy: str) -> None:
        raise RequestError(f"{run} trains an autoencoder, which generates nothing by itself; {remedy}")
