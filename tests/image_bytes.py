"""Images as the bytes of a PNG file."""

import io

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo


def png(pixels: np.ndarray | Image.Image, **text: str) -> bytes:
    """Encode pixels, uint8 [H, W] or [H, W, C]; `text` becomes text chunks."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    info, file = PngInfo(), io.BytesIO()
    for name, value in text.items():
        info.add_text(name, value)
    image.save(file, "PNG", pnginfo=info)
    return file.getvalue()


def random_png(seed: int, side: int = 16) -> bytes:
    """Return a square of RGB noise, another one for each seed."""
    return png(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))
