"""`unfog COMMAND …`: find the command, run it, end with its exit status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence

from unfog.errors import Interrupted, RequestError, UnfogError
from unfog.version import __version__

HELP = """\
Unfog trains image diffusion models on your own pictures, and never loses any of it.

usage: unfog COMMAND …

  train SOURCE     train on a folder of images, or on the built-in set `fashion`
  resume RUN       go on with a run, exactly where it was
  sample RUN       draw pictures
  evaluate RUN     measure its pictures, by FID, KID and others, and the loss of held-out images
  ema-sweep RUN    find the best length of the average of weights, after training
  tune RUN         find the best few steps to draw with, and make them the run's default
  report RUN       write report.html: settings, loss curves, pictures over time

  doctor SOURCE    look for what is wrong with images, settings and machine, before a run
  doctor RUN       say what went wrong in a run, and what to do
  plan SOURCE      predict memory, time and disk
  find-lr SOURCE   find a learning rate, on a throwaway copy
  pack SOURCE OUT  decode and resize images once, for all runs to come
  train-autoencoder SOURCE  make images small for large pictures: then train with --autoencoder
  slurm -- train SOURCE  write a batch file for a Slurm cluster; the same for resume

  unfog COMMAND --help   explains a command
  unfog --version        says which version this is
  --debug                with any command: a full traceback instead of one line

exit status: 0 done, 1 the run failed, 2 the request was wrong, 3 stopped by a signal after saving,
             130 stopped by a signal with nothing to save

try:  unfog train fashion --budget 3m        then:  unfog sample runs/fashion
"""

SAVES_NOTHING = ("doctor", "plan", "find-lr", "ema-sweep", "tune")
"""Commands that a signal stops without anything to go on from."""

LONGEST = 1000  # characters of a message


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; always ends in SystemExit."""
    use_what_streams_there_are()
    if "RANK" in os.environ:  # torch's own warnings, one for each process, on what is meant to be as it is
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        sys.exit(run(words))
    except UnfogError as error:
        if debug:
            raise
        sys.stderr.write(f"unfog: {in_a_line(str(error))}\n")
        sys.exit(error.exit_status)
    except Interrupted:
        sys.exit(130 if words[0] in SAVES_NOTHING else 3)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a help text has gone; work itself never ends here, see `progress.say`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError):
            sys.stderr.write(f"unfog: {in_a_line(str(error))}\n")
            sys.exit(1)
        from unfog.training.stability.out_of_memory import is_out_of_memory

        if is_out_of_memory(error):
            advice = "lower --microbatch: the effective batch stays the same; or choose a smaller --size or --network"
        else:
            advice = "this is a defect of unfog; --debug shows where"
        sys.stderr.write(f"unfog: {type(error).__name__}: {in_a_line(str(error))}\n({advice})\n")
        sys.exit(1)


def in_a_line(message: str) -> str:
    """A message without line breaks, and with what a terminal would obey (a name may hold anything) written out."""
    message = message.replace("\n", " ")
    if len(message) > LONGEST:
        message = f"{message[:LONGEST]} ... (--debug says all)"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def use_what_streams_there_are() -> None:
    """Let closed streams swallow what is written, and narrow ones show a question mark for what they cannot."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(words: list[str]) -> int:
    """Run the command that the first word names, and return its exit status."""
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"unfog {__version__}\n")
        return 0
    # Imported only now, so that the above answers at once.
    from unfog.cli import commands
    from unfog.cli import slurm_request as batch
    from unfog.config.aliases import COMMANDS
    from unfog.config.values import sanitize, suggest

    table: dict[str, Callable[[list[str]], int]] = {
        "train": commands.train,
        "train-autoencoder": commands.train_autoencoder,
        "resume": commands.resume,
        "sample": commands.sample,
        "evaluate": commands.evaluate,
        "ema-sweep": commands.ema_sweep,
        "tune": commands.tune,
        "report": commands.report,
        "doctor": commands.doctor,
        "plan": commands.plan,
        "find-lr": commands.find_lr,
        "pack": commands.pack,
        "slurm": batch.slurm,
    }
    words = [COMMANDS.get(words[0], words[0]), *words[1:]]
    if words[0] not in table:
        if words[0].startswith("-"):
            raise RequestError(
                f"{sanitize(words[0])} comes before the command; write unfog COMMAND first (see unfog --help)"
            )
        raise RequestError(f"{sanitize(words[0])} is not a command{suggest(words[0], table)} (see unfog --help)")
    return table[words[0]](words[1:])
