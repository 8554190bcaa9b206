"""Captions of tar shards: their .txt members, and keys of their .json members."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from unfog.data.columns.conditions import with_conditions
from unfog.data.sources.registry import open_source
from unfog.values.tokenizer import tokenizer_of

TEXTS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("heart", "star", "moon", "sun")]


@pytest.mark.parametrize("suffix", ["txt", "json"])
def test_captions_are_read_from_members_of_shards(tmp_path, suffix):
    with tarfile.open(tmp_path / "set-000.tar", "w") as shard:
        for i, text in enumerate(TEXTS):
            image = io.BytesIO()
            Image.new("L", (8, 8), i).save(image, "png")
            content = text.encode() if suffix == "txt" else json.dumps({"text": text}).encode()
            for ending, data in (("png", image.getvalue()), (suffix, content)):
                member = tarfile.TarInfo(f"{i:02}.{ending}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    source = with_conditions(open_source(str(tmp_path / "set-000.tar")), "text")
    column = source.columns["text"]
    decode = tokenizer_of(column.categories).decode
    assert [decode(row) for row in np.asarray(column.values).tolist()] == TEXTS
