"""Train on images whose conditional mean and covariance are known in closed form, and measure samples against these.

    python benchmarks/quality/linear_gaussian.py OUT [--steps 3000] [--samples 1000]

Images are x = a P + b Q + 0.3 e, of 4x4 values: a and b have mean 0, deviation 1 and correlation 0.6, P and Q are
patterns of unit power that are not orthogonal, and e is normal noise. Given a, b, both or neither, x is normal with a
mean and a covariance that follow from the rules of Gaussian conditioning. For each of these cases the script draws
samples, and prints the mean along P and Q and the covariance of these two coordinates beside the exact ones, and the
deviation of all other coordinates, which is 0.3. Guidance with weights has its closed form in
tests/diffusion/test_guidance_of_each.py.
"""

import argparse
from pathlib import Path

import unfog

import numpy as np

CORRELATION, NOISE, SIDE = 0.6, 0.3, 4
COVARIANCE = np.array([[1.0, CORRELATION], [CORRELATION, 1.0]])
CASES = [{"a": 1.0, "b": -0.5}, {"a": 1.0}, {"b": -1.0}, {"a": -1.5, "b": -1.0}, {}]


def patterns() -> np.ndarray:
    """Return P and Q, [2, 16], each with a mean square of 1 and with an inner product of 0.3 times 16."""
    x, y = np.meshgrid(*[np.linspace(-1, 1, SIDE)] * 2)
    first = x.ravel() / np.sqrt(np.mean(x**2))
    second = (x * x - y * y).ravel()  # orthogonal to the first
    second /= np.sqrt(np.mean(second**2))
    return np.stack([first, 0.3 * first + np.sqrt(1 - 0.3**2) * second])


def exact(given: dict[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean [2] and covariance [2, 2] of (a, b), given some of them."""
    known = [i for i, name in enumerate("ab") if name in given]
    gain = COVARIANCE[:, known] @ np.linalg.inv(COVARIANCE[np.ix_(known, known)]) if known else np.zeros((2, 0))
    mean = gain @ np.array([given["ab"[i]] for i in known])
    return mean, COVARIANCE - gain @ COVARIANCE[known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=1000)
    arguments = parser.parse_args()
    draw, both = np.random.default_rng(0), patterns()
    numbers = draw.multivariate_normal([0, 0], COVARIANCE, 8000)
    images = numbers @ both + NOISE * draw.normal(size=(len(numbers), SIDE * SIDE))
    run = unfog.train(
        images.reshape(-1, SIDE, SIDE, 1).astype(np.float32),
        out=arguments.out,
        conditions={"a": numbers[:, 0], "b": numbers[:, 1]},
        condition_dropout=0.2,
        size=SIDE,
        network="dit:depth=2,width=64,patch=2",
        batch=128,
        steps=arguments.steps,
        data={"dtype": "float32", "held_out": 0},
        preview={"every": -1},
        evaluate={"every": -1},
        device="cpu",
    )
    # Coordinates of an image along P and Q, whose noise has this covariance, and the rest, which is noise alone.
    read = np.linalg.pinv(both)
    print(
        "given              mean (a, b)             exact            covariance aa, ab, bb     exact              rest"
    )
    for given in CASES:
        found = np.asarray(run.sample(arguments.samples, given=given, guidance=1, steps=30), np.float64)
        flat = found.reshape(len(found), -1)
        at = flat @ read
        rest = (flat - at @ both).std() * np.sqrt(flat.shape[1] / (flat.shape[1] - 2))
        mean, covariance = exact(given)
        covariance = covariance + NOISE**2 * np.linalg.inv(both @ both.T)
        measured = np.cov(at.T)
        columns = [at.mean(0), mean, measured[np.triu_indices(2)], covariance[np.triu_indices(2)]]
        shown = ["  ".join(f"{value:6.3f}" for value in each) for each in columns]
        print(f"{spelled(given):18} {shown[0]:22} {shown[1]:16} {shown[2]:25} {shown[3]:24} {rest:.3f}", flush=True)


def spelled(given: dict[str, float]) -> str:
    return " ".join(f"{name}={value:g}" for name, value in given.items()) or "neither"


if __name__ == "__main__":
    main()
