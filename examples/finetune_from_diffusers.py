"""Go on from a U-Net that diffusers trained, on images of your own.

    pip install 'unfog[export]'
    python finetune_from_diffusers.py MODEL photos/ --steps 2000

MODEL is a local folder that diffusers wrote: of a `UNet2DModel`, or of a pipeline that has one.
"""

import argparse

import unfog


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the weights")
    parser.add_argument("photos", help="folder of images")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="runs/finetuned")
    asked = parser.parse_args()

    # Network, size, noise schedule and target follow from the weights. The learning rate is lower than for new ones.
    run = unfog.train(asked.photos, init=asked.model, steps=asked.steps, out=asked.out)
    run.sample(4, seed=0).pil()[0].save(run.path / "first.png")

    # And back: a pipeline that DiffusionPipeline.from_pretrained loads.
    print(run.export(run.path / "diffusers", format="diffusers"))


if __name__ == "__main__":
    main()
