"""A worker of the playground without torch: it "draws" grey pictures, and does what the name of the run says."""

import os
import signal
import sys
import time
from pathlib import Path

from unfog.serve.playground.channel import Channel


def draw(channel: Channel, job: int, head: dict, run: str) -> None:
    count, steps = head["settings"]["n"], head["settings"].get("steps", 3)
    tiles = [count, 4, 4, 1]
    channel.send("began", job, steps=steps, batches=1, device="cpu", size=4)
    for number in range(steps):
        if channel.is_cancelled(job):
            channel.send("done", job, images=[0], stopped=True, seconds=0.0, calls=number)
            return
        time.sleep(head["settings"].get("guidance", 0.0))
        share, body = 1 - number / steps, bytes([number]) * (2 * count * 16)
        channel.send("step", job, body, number=number, first=0, share=share, tiles=tiles)
        if run == "killed" and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if run == "garbage":
            os.write(channel._target.fileno(), b"\xff" * 64)
    channel.send("done", job, bytes([200]) * (count * 16), images=tiles, stopped=False, seconds=0.1, calls=steps)


def main() -> None:
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    channel = Channel(sys.stdin.buffer, target)
    while (message := channel.next_job()) is not None:
        job, run = int(message.head["job"]), os.path.basename(message.head["run"])
        if run == "rotated" and message.head["weights"]["step"] == 20:
            # As a run that trains does: a newer checkpoint, and the old one is deleted.
            folder = Path(message.head["run"]) / "checkpoints"
            (folder / "00000020").rename(folder / "00000030")
            channel.send("failed", job, error="there is no such checkpoint")
        elif run == "broken":
            channel.send("failed", job, error="CUDA error: an illegal memory access was encountered", ends=True)
            time.sleep(60)  # as a driver that tidies up
        elif run == "refused":
            channel.send("failed", job, error="this run is refused")
        elif run == "silent":
            print("the model does not fit", file=sys.stderr, flush=True)
            os._exit(3)
        else:
            draw(channel, job, message.head, run)


main()
