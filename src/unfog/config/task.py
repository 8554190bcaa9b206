"""Tasks of a run: train a diffusion model, or an autoencoder for the latents of other runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from unfog.data.settings import Data
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import Autoencoder
from unfog.settings import is_auto


class RunTask(ABC):
    """Facts about a kind of training. `pipeline.build` and `runs.previews` hold the parts that need torch."""

    chooses_network: ClassVar[bool]
    """True if the network is a setting. Automatic batch and compilation follow measurements of these networks."""
    generates: ClassVar[bool]
    """True if the trained network generates images from noise, so that there are noise levels to check."""
    next_command: ClassVar[str]
    """Command to give a finished run to, without its folder."""
    one_size: ClassVar[str]
    """Reason why images of several sizes cannot be trained on, and what to do; "" if they can."""
    pictures_only: ClassVar[str]
    """Reason why only pictures of 8 bits can be trained on; "" if other values can."""

    @abstractmethod
    def check(self, data: Data) -> None:
        """Raise RequestError if these settings of images are not for this training. They may be incomplete."""

    @abstractmethod
    def check_generates(self, run: str, remedy: str) -> None:
        """Raise RequestError if the result of this training cannot generate images; `run` names it in the message."""


class DiffusionTask(RunTask):
    """Train a network that generates images."""

    chooses_network = generates = True
    next_command = "sample"
    one_size = pictures_only = ""

    def check(self, data: Data) -> None:
        pass

    def check_generates(self, run: str, remedy: str) -> None:
        pass


@dataclass(frozen=True)
class AutoencoderTask(RunTask):
    """Train an autoencoder, by `unfog train-autoencoder`."""

    settings: Autoencoder

    chooses_network = generates = False
    next_command = "train SOURCE --autoencoder"
    one_size = "an autoencoder is trained on images of one size; omit --aspect"
    pictures_only = "autoencoders take pictures"

    def check(self, data: Data) -> None:
        if data.wrapped:
            raise RequestError(f"wrap = {data.wrap} is not for autoencoders, which pad with zeros; omit --wrap")
        if data.condition:
            raise RequestError(
                f"data.condition = {data.condition} is not for autoencoders, which learn images alone; give it to "
                "unfog train --autoencoder"
            )
        if not is_auto(data, "size"):
            self.settings.check(data.size)

    def check_generates(self, run: str, remedy: str) -> None:
        raise RequestError(f"{run} trains an autoencoder, which generates nothing by itself; {remedy}")
