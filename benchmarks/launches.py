"""Count what a training step launches on a GPU, without one: `benchmarks/launches.py [--compiled] [NETWORK ...]`.

The real loop runs on a CUDA device that is not there (tests/fake_cuda), in bf16 with batches of 64. An operation of
torch counts as one launch, though some kernels are several; views and allocations count as none. Casts are among the
operations. Convolutions in NCHW are those of the forward pass whose input cuDNN would have to convert. Of a captured
step (`--training.capture`, with Muon) the host launches one graph, and what it does beside that: reading, and counting.

`--compiled` needs a CUDA build of torch, and minutes for a network: the step of AdamW with `--compile`, in which each
kernel of Triton is a launch too (tests/fake_cuda/compiled.py).
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
    names = [name for name in sys.argv[1:] if name != "--compiled"] or list(SIDES)
    (count_compiled if "--compiled" in sys.argv else count)(names)


def count(names: list[str]) -> None:
    import cases  # loads the device, and torch after it

    cases.torch.autograd.set_multithreading_enabled(False)
    titles = f"{'AdamW':>6}{'Muon':>7}{'casts':>7}{'NCHW':>6} of {'all':<5}{'waits':>6}{'captured':>14}"
    print(f"{'network':<12}{'px':>4}  {titles}")
    for name in names:
        adamw, muon = (cases.step_of(cases.whole(name, SIDES[name], method)) for method in ("adamw", "muon"))
        capture = cases.update(cases.whole(name, SIDES[name], "muon"), {"training": {"capture": True}}, "")
        captured = cases.step_of(capture, whole=True)
        convolutions = {key: count for key, count in adamw.layouts.items() if key.startswith("convolution of")}
        flat = sum(count for key, count in convolutions.items() if "NCHW" in key)
        print(
            f"{name:<12}{SIDES[name]:>4}  {adamw.operations:>6,}{muon.operations:>7,}{adamw.named['_to_copy']:>7,}"
            f"{flat:>6} of {sum(convolutions.values()):<5}{sum(muon.waits.values()):>6}"
            f"{captured.named['replay']:>6} graph +{captured.operations}",
            flush=True,
        )


def count_compiled(names: list[str]) -> None:
    import compiled

    compiled.torch.autograd.set_multithreading_enabled(False)
    for name in names:
        watch = compiled.compiled_step_of(compiled.cases.whole(name, SIDES[name]))
        print(name, SIDES[name], compiled.figures(watch), flush=True)


if __name__ == "__main__":
    main()
