"""Process of the worker, which owns model and device. It draws one job at a time for the server.

Started as `python -m unfog.serve.playground.worker_process`. It reads messages on its standard input, and answers on
its standard output. It ends when its input does, so no worker outlives a server that is killed.
"""

from __future__ import annotations

import os
import sys
import traceback

from unfog.errors import RequestError, RunError
from unfog.serve.playground.channel import Channel

_CUDA_ERRORS = ("CUDA error", "CUDA driver error", "cuDNN error", "CUDNN_STATUS", "CUBLAS_STATUS", "CUFFT_STATUS")


def serve(channel: Channel) -> None:
    """Do what the server asks for, job after job, until it goes."""
    from unfog.serve.playground.studio import Studio, find_copies

    studio = Studio()
    work = {"draw": studio.draw, "copies": find_copies}
    while (message := channel.next_job()) is not None:
        job = int(message.head["job"])
        _lower_priority(int(message.head.get("nice", 0)))
        broken = False
        try:
            work[message.head["op"]](channel, job, message)
        except (RequestError, RunError, OSError) as error:
            broken = _has_broken_device(error)
            channel.send("failed", job, error=str(error), ends=broken)
        except Exception as error:  # such as memory that does not suffice: the worker goes on with the next job
            traceback.print_exc()
            if not (broken := _has_broken_device(error)):
                studio.forget()
            channel.send("failed", job, error=f"{type(error).__name__}: {str(error)[:500]}", ends=broken)
        if broken:
            return


def _has_broken_device(error: BaseException | None) -> bool:
    """Return whether an error or its cause is one of CUDA, after which no work on the GPU succeeds in this process."""
    from torch import OutOfMemoryError

    while error is not None:
        # Memory that does not suffice has a type of its own, and leaves the GPU as it was.
        of_cuda = type(error).__name__ == "AcceleratorError" or any(words in str(error) for words in _CUDA_ERRORS)
        if of_cuda and isinstance(error, RuntimeError) and not isinstance(error, OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _lower_priority(nice: int) -> None:
    """Yield the processor to a run that trains here. Only a new worker has the usual priority again."""
    if hasattr(os, "nice") and (more := nice - os.nice(0)) > 0:
        os.nice(more)


def main() -> None:
    """Serve the server that has started this process."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the messages
    serve(Channel(sys.stdin.buffer, target))
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main()
