"""Is it a copy? The training images nearest to drawn pictures, with distances beside those of held-out images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from unfog.errors import RequestError
from unfog.inference.memorization import FEWEST, find_nearest_images
from unfog.pipeline.load_data import load_images
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.serve.playground.channel import Channel
from unfog.serve.playground.protocol import Message
from unfog.text import sanitize

_SHOWN = 3  # nearest training images of a picture


def find_copies(channel: Channel, job: int, message: Message) -> None:
    """Find the nearest training images of the pictures in the message, uint8 [N, H, W, C], and send them.

    Raises:
        RequestError: the training images are not there any more, have changed, or are too few.
    """
    drawn = np.frombuffer(message.body, np.uint8).reshape(message.head["images"])
    config = RunFolder(Path(message.head["run"])).read_config()
    config = replace(config, training=replace(config.training, images=0, steps=0))
    dataset, found = load_images(config, StopSignals())
    if config.fingerprint and found.fingerprint != config.fingerprint:
        raise RequestError(f"the images in {sanitize(config.source)} are not those that this run was trained on")
    if len(dataset.train) < FEWEST:
        raise RequestError(f"of {len(dataset.train)} training images all are near; at least {FEWEST} are needed")
    near = find_nearest_images(drawn, dataset)
    shown = min(_SHOWN, near.found.image.shape[1])
    rows = near.found.image[:, :shown].numpy()
    ratios, usual = near.found.ratio, np.sort(near.unseen.ratio)
    pictures = [
        {
            "ratio": round(float(ratios[i]), 4),
            "copy": bool(ratios[i] < near.limit),
            "distances": [round(float(one), 2) for one in near.found.distance[i, :shown]],
            "nearer_than": round(1 - float(np.searchsorted(usual, ratios[i], "right")) / len(usual), 4),
        }
        for i in range(len(drawn))
    ]
    unseen = near.unseen.distance[:, 0].numpy()
    facts = {
        "pictures": pictures,
        "limit": round(near.limit, 4),
        "searched": len(dataset.train),
        "unseen": {
            "what": near.what,
            "count": len(usual),
            "distances": [round(float(one), 2) for one in np.quantile(unseen, [0.05, 0.5, 0.95])],
            "ratios": [round(float(one), 4) for one in np.quantile(usual, [0.05, 0.5, 0.95])],
        },
    }
    nearest = dataset.train.pixels[rows.flatten()].transpose(0, 2, 3, 1)
    channel.send("copies", job, np.ascontiguousarray(nearest).tobytes(), images=nearest.shape, shown=shown, **facts)
