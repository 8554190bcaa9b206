"""A real Jupyter kernel: progress below the cell, results shown as images and tables, and an interrupted cell."""

import time
from pathlib import Path

import pytest

import unfog
from conftest import NETWORK

manager = pytest.importorskip("jupyter_client.manager")

PREPARE = f"""
import torch; torch.set_num_threads(1)
import numpy as np, unfog
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), np.uint8)
SETTINGS = dict(size=8, batch=4, lr=1e-3, network={NETWORK!r}, preview=dict(images=1), sampler=dict(steps=2))
class Net(torch.nn.Conv2d):
    def forward(self, x, noise, label=None): return super().forward(x)
"""


class Notebook:
    def __init__(self, folder):
        self.kernel, self.client = manager.start_new_kernel(kernel_name="python3", cwd=str(folder))

    def run(self, code, interrupt_when=None):
        """Run a cell; return its messages as (type, content)."""
        asked, messages, interrupted = self.client.execute(code), [], False
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return messages
            messages.append((kind, content))
            if interrupt_when and not interrupted and interrupt_when in str(content):
                self.kernel.interrupt_kernel()
                interrupted = True
        raise TimeoutError(messages[-3:])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(Path(unfog.__file__).parents[1]))
        opened = Notebook(tmp_path_factory.mktemp("notebook"))
        assert not [one for one in opened.run(PREPARE) if one[0] == "error"]
        yield opened
        opened.client.stop_channels()
        opened.kernel.shutdown_kernel(now=True)


def texts(messages, kind):
    return [content["data"]["text/plain"] for found, content in messages if found == kind]


@pytest.mark.slow
def test_progress_is_one_text_that_is_replaced_and_results_are_rich(notebook):
    messages = notebook.run("run = unfog.train(IMAGES, out='run', steps=3, **SETTINGS); run")
    assert not [content for kind, content in messages if kind == "error"]
    shown, updates = texts(messages, "display_data"), texts(messages, "update_display_data")
    assert any("step" in text and "━" in text for text in [*shown, *updates])
    assert updates[-1] == ""
    said = "".join(content["text"] for kind, content in messages if kind == "stream")
    assert "training 0.05M parameters in run" in said
    assert "finished at step 3" in said
    assert "\x1b" not in said
    assert "so far" not in said  # no plain lines of progress besides
    (result,) = [content["data"] for kind, content in messages if kind == "execute_result"]
    assert result["text/plain"].startswith("<run run: unet, 0.05M parameters")
    assert "data:image/png;base64," in result["text/html"]
    (samples,) = [one["data"] for kind, one in notebook.run("run.sample(4, steps=2)") if kind == "execute_result"]
    assert samples["text/plain"].startswith("<samples: 4 images of 8x8 pixels")
    assert "data:image/png;base64," in samples["text/html"]


@pytest.mark.slow
def test_a_network_of_a_cell_has_its_source_noted(notebook):
    messages = notebook.run(
        "del SETTINGS['network']\n"
        "run = unfog.train(IMAGES, out='own', steps=1, network=Net(3, 3, 1), **SETTINGS)\n"
        "print((run.path / 'network-source.txt').read_text())"
    )
    said = "".join(content["text"] for kind, content in messages if kind == "stream")
    assert "class Net(torch.nn.Conv2d):" in said


@pytest.mark.slow
def test_an_interrupted_cell_leaves_a_saved_run(notebook):
    code = "unfog.train(IMAGES, out='long', steps=1000000, **SETTINGS)"
    messages = notebook.run(code, interrupt_when="images/s")
    (error,) = [content for kind, content in messages if kind == "error"]
    assert error["ename"] == "KeyboardInterrupt"
    assert "stopped, and saved in long" in error["evalue"]
    messages = notebook.run("unfog.load('long').checkpoint.step > 0")
    assert texts(messages, "execute_result") == ["True"]
