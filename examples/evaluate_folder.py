"""Measure a folder of generated images against real ones; who generated them does not matter.

python evaluate_folder.py generated/ photos/
"""

import argparse

import unfog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("generated", help="folder of generated images")
    parser.add_argument("reference", help="real images: a folder, an archive, a pack, …")
    parser.add_argument("--features", default="", help="the feature network, if not the one chosen automatically")
    asked = parser.parse_args()

    found = unfog.evaluate(asked.generated, reference=asked.reference, features=asked.features)
    for one in found.measured:
        if one.value is not None:  # some need more images
            print(f"{one.metric:10} {one.value:8.4f}   real images against each other: {one.real}")
    print(found, found.verdict)


if __name__ == "__main__":
    main()
