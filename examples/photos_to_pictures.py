"""From a folder of photos to new pictures: check, train, sample, evaluate.

python photos_to_pictures.py photos/ --budget 1h
"""

import argparse

import unfog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="a folder; its sub-folders become classes")
    parser.add_argument("--budget", default="1h", help="time to train, such as 20m or 8h")
    parser.add_argument("--size", type=int, default=64, help="pixels; the photos are cropped to squares and resized")
    asked = parser.parse_args()

    # Problems in images and settings, before time is spent on them. Each finding says what to do about it.
    for finding in unfog.doctor(asked.photos, size=asked.size, budget=asked.budget, quick=True):
        if finding.severity in ("warning", "fatal"):
            print(f"{finding.severity}: {finding.evidence}; {finding.remedy}")

    # What is left open is chosen from images and machine, and printed with the reason. Ctrl-C saves: unfog.resume
    # continues as if nothing had happened.
    run = unfog.train(asked.photos, size=asked.size, budget=asked.budget)

    # Sample i depends on the seed and i alone: more of them later begin with the same ones.
    samples = run.sample(16, seed=0)
    for number, picture in enumerate(samples.pil()):
        picture.save(run.path / f"picture-{number:02}.png")

    print(run.evaluate(n=200).verdict)
    print(f"pictures, report.html and weights are in {run.path}")


if __name__ == "__main__":
    main()
