"""The doctor looks at captions."""

import numpy as np

from unfog.checks.images.caption_checks import check_captions
from unfog.data.columns.captions import caption_column
from unfog.data.dataset import ImageSet


def findings(captions, held_out=(), flip=False):
    cells = [*captions, *held_out]
    names = [str(i) for i in range(len(cells))]
    made = caption_column("text", cells, names, lambda: np.arange(len(captions)))
    images = ImageSet(np.zeros((len(cells), 1, 4, 4), np.uint8), names, {"text": made})
    parts = images.subset(slice(len(captions))), images.subset(slice(len(captions), None))
    return {one.code: one for one in check_captions(*parts, flip)}


def test_good_captions_are_fine():
    found = findings(["a red heart", "a blue heart", "a red star", "a blue star"] * 3, ["a red moon"])
    assert {one.severity for one in found.values()} == {"fine"}
    assert "4 different" in found["data.captions"].evidence


def test_captions_that_say_little_are_named():
    assert "'a photo'" in findings(["a photo"] * 8 + ["a red heart"])["data.captions"].evidence
    once = findings([f"word{i} other{i} a" for i in range(9)])["data.captions"]
    assert once.severity == "hint"
    assert "other0" in once.evidence


def test_sides_and_mirrors_are_named_together():
    captions = ["a heart, left", "a heart, right", "a star", "a heart"] * 3
    assert findings(captions)["data.caption_sides"].severity == "fine"
    mirrored = findings(captions, flip=True)["data.caption_sides"]
    assert mirrored.severity == "warning"
    assert "50%" in mirrored.evidence


def test_held_out_captions_of_training_images_are_counted():
    captions = ["a red heart", "a blue heart"] * 4
    assert findings(captions, ["a red heart"] * 3)["data.caption_leak"].severity == "hint"
    assert findings(captions, [None])["data.caption_leak"].severity == "fine"
