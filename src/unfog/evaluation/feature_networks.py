"""Feature networks, loaded from TorchScript files, and the resizing that each was trained with."""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.device.copies import to_device
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, path_variable
from unfog.files.safe_files import read_file
from unfog.text import manual
from unfog.values.image_format import BYTES

INCEPTION_FILE = "inception-2015-12-05.pt"
# The network of Heusel et al. 2017, converted from TensorFlow's inception-2015-12-05.tgz: RGB [N, 3, 299, 299] in
# (pixel - 128) / 128 to the 2048 numbers of its last pooling.
_INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"

_LARGEST_INCEPTION = 2**27  # bytes; it has 96 million
_LARGEST = 2**32  # bytes of a network that a person names
# Device types on which networks run in channels_last. On a CPU it is a quarter faster; cuDNN is slower with it in fp32
# without TF32.
_CHANNELS_LAST_ON = ("cpu",)

# Offset subtracted from a pixel in 0 to 255, and divisor.
_RANGES = {
    "unit": (0.0, 255.0),
    "symmetric": (BYTES.middle, BYTES.half),
    "inception": (128.0, 128.0),
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),  # mean and standard deviation of ImageNet
    "bytes": (0.0, 1.0),
}


@dataclass(frozen=True)
class _NetworkInput:
    """Input that a feature network expects: size, value range and resize."""

    path: str
    size: int = 224
    """Side in pixels; 0 = as they come."""
    range: str = "imagenet"
    """One of _RANGES."""
    resize: str = "bicubic"
    """bicubic = smoothed where it shrinks; tf1 = TensorFlow 1's bilinear."""


@dataclass(frozen=True)
class _TorchScriptNetwork:
    """A loaded network and its input settings: float32 [N, 3, H, W] in 0 to 255 -> [N, D]."""

    network: torch.jit.ScriptModule
    name: str
    digest: str
    settings: _NetworkInput

    @property
    def resize(self) -> str:
        if not self.settings.size:
            return "none"
        how = {"tf1": "TF1 bilinear", "bicubic": "bicubic antialiased"}[self.settings.resize]
        return f"{how} {self.settings.size}"

    def __call__(self, x: Tensor) -> Tensor:
        size = self.settings.size
        if size and x.shape[2:] != (size, size):
            x = _tf1_bilinear(x, size) if self.settings.resize == "tf1" else _antialiased(x, size)
        mean, deviation = (to_device(torch.tensor(v), x.device).view(-1, 1, 1) for v in _RANGES[self.settings.range])
        x = (x - mean) / deviation
        if x.device.type in _CHANNELS_LAST_ON:
            x = x.contiguous(memory_format=torch.channels_last)
        # The profiling executor may fuse from the second call on, and then rounds otherwise than in the first.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            y: Tensor = self.network(x)
        return y


def _digest(sha256: str, settings: _NetworkInput) -> str:
    # The resize belongs to it, as features of the same network after another resize are other features.
    parts = f"{sha256} {settings.size} {settings.range} {settings.resize}"
    return hashlib.sha256(parts.encode()).hexdigest()


_INCEPTION_INPUT = _NetworkInput(INCEPTION_FILE, 299, "inception", "tf1")
INCEPTION_DIGEST = _digest(_INCEPTION_SHA256, _INCEPTION_INPUT)


def inception_path() -> Path:
    """Return the path of the Inception network: $UNFOG_INCEPTION, else in Unfog's cache folder."""
    return path_variable("UNFOG_INCEPTION") or cache_folder() / INCEPTION_FILE


def load_inception(device: torch.device) -> _TorchScriptNetwork:
    """Load the Inception network of FID from `inception_path`.

    RequestError if the file is missing, or has another SHA-256.
    """
    path = inception_path()
    if not path.is_file():
        raise RequestError(
            f"features = inception needs {path}, which is not there; put {INCEPTION_FILE} there, name it by "
            f"UNFOG_INCEPTION, or use --features texture; {manual('docs/metrics.md')} has the lines that fetch it"
        )
    content = _read(path, _LARGEST_INCEPTION)
    if (found := hashlib.sha256(content).hexdigest()) != _INCEPTION_SHA256:
        raise RequestError(f"{path} has SHA-256 {found[:12]}…, not {_INCEPTION_SHA256[:12]}…: fetch it again")
    return _TorchScriptNetwork(_load(content, path, device), "inception", INCEPTION_DIGEST, _INCEPTION_INPUT)


def load_torchscript(settings: _NetworkInput, device: torch.device, only_known: bool) -> _TorchScriptNetwork:
    """Load the network of a file; Inception is recognised under any file name, and gets its own input settings.

    RequestError if there is no such file, it is not TorchScript, or `only_known` and it is not Inception.
    """
    path = Path(os.path.expanduser(settings.path))
    # Of a file that settings name, no more is read than what could be Inception.
    content = _read(path, _LARGEST_INCEPTION if only_known else _LARGEST)
    sha256 = hashlib.sha256(content).hexdigest()
    name = f"{path.stem}@{sha256[:8]}"
    # By content: under another name it would get the resize of other networks, and a FID that compares with no other.
    if sha256 == _INCEPTION_SHA256:
        name, settings = "inception", _INCEPTION_INPUT
    elif only_known:
        raise RequestError(
            f"features = {settings.path!r} is a program that these settings name; if you trust it, give it "
            "yourself with --features"
        )
    return _TorchScriptNetwork(_load(content, path, device), name, _digest(sha256, settings), settings)


def parse_network_file(text: str) -> _NetworkInput:
    """`PATH.pt`, or `PATH.pt:size=224,range=imagenet,resize=bicubic` with any of these.

    RequestError for an unknown option, or a value that is not among those it may have.
    """
    match = re.fullmatch(r"(.*\.pt)(?::(.*))?", text)
    if not match:
        raise RequestError(f"features = {text!r} is not a path that ends in .pt, with options such as :size=224")
    options = {"size": "224", "range": "imagenet", "resize": "bicubic"}
    given = dict(part.partition("=")[::2] for part in (match[2] or "").split(",") if part)
    if unknown := given.keys() - options:
        raise RequestError(f"features has no option {min(unknown)!r}; there is size, range, resize")
    size, values, resize = (options | given).values()
    if not size.isdecimal():
        raise RequestError(f"size = {size!r} of features must be a number of pixels, or 0 for the size of the images")
    if values not in _RANGES:
        raise RequestError(f"range = {values!r} of features must be one of {', '.join(_RANGES)}")
    if resize not in ("bicubic", "tf1"):
        raise RequestError(f"resize = {resize!r} of features must be bicubic or tf1")
    return _NetworkInput(match[1], int(size), values, resize)


def _read(path: Path, limit: int) -> bytes:
    """Return the content of a regular file; RequestError for a pipe, which might never end, and above the limit."""
    try:
        return read_file(path, path.parent, limit, follow=True)
    except OSError as error:
        raise RequestError(f"features = {path} cannot be read ({error.strerror}); give another --features") from error
    except ValueError:
        raise RequestError(f"features = {path} has over {limit / 1e6:,.0f} MB; give another --features") from None


def _load(content: bytes, path: Path, device: torch.device) -> torch.jit.ScriptModule:
    # From the bytes that were hashed, as the file may have changed since.
    try:
        network: torch.jit.ScriptModule = torch.jit.load(io.BytesIO(content), map_location=device)  # type: ignore[no-untyped-call]
        return network.eval()
    except RuntimeError as error:
        raise RequestError(
            f"features = {path} is not a TorchScript file; make one with torch.jit.trace(…).save"
        ) from error


def _tf1_bilinear(x: Tensor, size: int) -> Tensor:
    """Bilinear resize of float [N, C, H, W] to [N, C, size, size] as TensorFlow 1 did it by default.

    Output pixel i reads at i * in / out, without half-pixel centres and without smoothing before shrinking; past the
    last pixel the last one is repeated (`resize_bilinear`, align_corners=False). The FID of the literature rests on
    it (Heusel et al. 2017; Parmar et al. 2022, section 3, on what other resizes do to the figure).
    """
    rows, next_row, down = (to_device(values, x.device) for values in _neighbours(x.shape[2], size))
    columns, next_column, right = (to_device(values, x.device) for values in _neighbours(x.shape[3], size))
    x = x[:, :, :, columns].lerp(x[:, :, :, next_column], right)
    return x[:, :, rows].lerp(x[:, :, next_row], down[:, None])


def _neighbours(length: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each output place the pixels before and after it, and its distance from the first, in float32."""
    # In double precision a few places would round to another pixel than there.
    scale = torch.tensor(length, dtype=torch.float32) / size
    place = torch.arange(size, dtype=torch.float32) * scale
    before = place.long().clamp(max=length - 1)
    return before, (before + 1).clamp(max=length - 1), place - before


def _antialiased(x: Tensor, size: int) -> Tensor:
    """Bicubic resize of float [N, C, H, W] to [N, C, size, size], smoothed where it shrinks, half-pixel centres."""
    return F.interpolate(x, size=(size, size), mode="bicubic", antialias=True)
