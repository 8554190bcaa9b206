"""Count what a training step launches on a GPU, without one: `python benchmarks/launches.py [NETWORK ...]`.

The real loop runs on a CUDA device that is not there (tests/fake_cuda), in bf16 with batches of 64. An operation of
torch counts as one launch, though some kernels are several; views and allocations count as none. Casts are among the
operations. Convolutions in NCHW are those of the forward pass whose input cuDNN would have to convert.
"""

import os
import sys
import tempfile
from pathlib import Path

FAKES = Path(__file__).parents[1] / "tests" / "fake_cuda"
SIDES = {"tiny": 32, "small": 32, "cifar10": 32, "base": 64, "dit-small": 32, "dit-base": 32, "mp-base": 64}


def main() -> None:
    sys.path.insert(0, str(FAKES))
    from compile_device import compile_device

    os.environ["FAKE_CUDA"] = str(compile_device(Path(tempfile.mkdtemp()) / "device.so"))
    import cases  # loads the device, and torch after it

    cases.torch.autograd.set_multithreading_enabled(False)
    print(f"{'network':<12}{'px':>4}  {'AdamW':>6}{'Muon':>7}{'casts':>7}{'NCHW':>6} of {'all':<5}{'waits':>6}")
    for name in sys.argv[1:] or SIDES:
        watches = []
        for method in ("adamw", "muon"):
            training, data = {"batch": 64, "images": 6400}, {"size": SIDES[name]}
            config = cases.config_of(name, training=training, data=data, optimizer={"method": method})
            watches.append(cases.step_of(config))
        adamw, muon = watches
        convolutions = {key: count for key, count in adamw.layouts.items() if key.startswith("convolution of")}
        flat = sum(count for key, count in convolutions.items() if "NCHW" in key)
        print(
            f"{name:<12}{SIDES[name]:>4}  {adamw.operations:>6,}{muon.operations:>7,}{adamw.named['_to_copy']:>7,}"
            f"{flat:>6} of {sum(convolutions.values()):<5}{sum(muon.waits.values()):>6}",
            flush=True,
        )


if __name__ == "__main__":
    main()
