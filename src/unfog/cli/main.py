"""`unfog COMMAND …`: find the command, run it, and exit with its status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from unfog import __version__
from unfog.errors import Interrupted, NothingSaved, RequestError, UnfogError
from unfog.process import command_clock, early_signals

USAGE = """\
Unfog trains image diffusion models on your own images.

usage: unfog COMMAND …

  train SOURCE     train on a folder of images, or on the built-in set `fashion`
  resume RUN       continue a run exactly where it stopped
  sample RUN       generate images; with --image, change a part of one, or vary it
  evaluate RUN     measure FID, KID and other metrics, and the loss of held-out images
  ema-sweep RUN    find the best EMA length after training
  tune RUN         find the best noise levels for sampling in few steps
  report RUN       write report.html: settings, loss curves, samples over time
  export RUN OUT   write the network for other programs: diffusers, safetensors, onnx, pt2, denoiser
  runs [FOLDER]    list runs: state, step, best metric, disk space, age
  watch RUN        show live charts of a run in the terminal
  serve [FOLDER]   show all runs on a page in the browser: live charts, samples, buttons, drawing

  doctor SOURCE    check images, settings and machine before a run
  doctor RUN       find what went wrong in a run, and a remedy
  doctor --gpu     check the GPU: arithmetic, copies, a training step, repeatability
  plan SOURCE      predict memory, time and disk space
  find-lr SOURCE   find a learning rate on a throwaway copy
  pack SOURCE OUT  decode and resize images once, for all later runs
  train-autoencoder SOURCE  train an autoencoder for large images; then train with --autoencoder
  slurm train SOURCE  write a batch file for a Slurm cluster; also `slurm resume RUN`
  init             ask five questions, and write a commented file of settings for train --config
  explain SETTING  what a setting does, its default and why; alone, it lists all settings
  docs [PAGE]      show the documentation of this version in the browser
  completion SHELL print a script by which bash, zsh or fish complete commands and flags
  cache            list the cache folder; --clear or --limit GB makes room in it

  unfog COMMAND --help   explain a command; --help-all lists every setting
  unfog --version        print the version
  --debug                with any command: print a full traceback instead of one line

exit status: 0 done, 1 the run failed, 2 the request was wrong, 3 stopped by a signal after saving,
             130 stopped by a signal with nothing to save

try:  unfog train fashion --budget 3m        then:  unfog sample runs/fashion
"""

_TRAINING = ("train", "train-autoencoder", "resume")
# A signal leaves nothing to continue from, which their exit status says.
_SAVES_NOTHING = ("doctor", "plan", "find-lr", "ema-sweep", "tune", "export", "cache", "serve")
# Modules of commands that share one, or are elsewhere; else a module has the name of its command.
_MODULES = {"report": "evaluate", "export": "sample", "serve": "command"} | dict.fromkeys(_TRAINING, "train")
_LAYERS = {"completion": "cli", "serve": "serve", "docs": "serve"}  # completion is about the command line itself
_MAX_MESSAGE = 1000  # characters


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; always ends in SystemExit."""
    if arguments is None and _trains(sys.argv[1:2]):
        early_signals.catch(saved=_trains(sys.argv[1:2], ("resume",)))  # first, as imports take seconds
    try:
        _main(arguments)
    finally:
        early_signals.ignore()


def _trains(words: Sequence[str], commands: Sequence[str] = _TRAINING) -> bool:
    from unfog.config.aliases import COMMANDS

    return any(COMMANDS.get(word, word) in commands for word in words)


def _main(arguments: Sequence[str] | None) -> None:
    _prepare_streams()
    # torch warns once per process, and so once per rank.
    if "RANK" in os.environ:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments is None:
        command_clock.begin()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words  # of every command, and so of no request
    words = [word for word in words if word != "--debug"]
    try:
        sys.exit(_run(words))
    except UnfogError as error:
        if debug:
            raise
        sys.stderr.write(f"unfog: {one_line(str(error))}\n")
        sys.exit(error.exit_status)
    except KeyboardInterrupt as stopped:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write("Stopped.\n")
        if isinstance(stopped, Interrupted) and words[0] not in _SAVES_NOTHING:
            sys.exit(stopped.exit_status)
        sys.exit(NothingSaved.exit_status)
    except BrokenPipeError:  # `| head` has closed the pipe; work itself never ends here, see `progress.say`
        # Python flushes stdout once more as it exits, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        if early_signals.received:  # a module that was interrupted as it was imported raises what it likes
            sys.exit(early_signals.stop_error.exit_status)
        sys.stderr.write(_describe_unexpected(error))
        sys.exit(1)


def _describe_unexpected(error: Exception) -> str:
    """Return the message for an error that no check has foreseen, with what can be done about it."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        said = f"{error.filename}: {reason}" if error.filename else reason
        return f"unfog: {one_line(said)}; correct that, then repeat the command\n"
    from unfog.custom.consent import place_of
    from unfog.device.cores import is_thread_limit

    # Only now, as it imports torch, which a wrong request need not wait for.
    from unfog.training.stability.out_of_memory import is_out_of_memory

    if is_thread_limit(error):
        advice = "a limit of processes is reached: raise pids.max of the container, or ulimit -u"
    elif is_out_of_memory(error):
        advice = "lower --microbatch: the effective batch stays the same; or choose a smaller --size or --network"
    elif place := place_of(error):  # of somebody's own network, loss or sampler step
        advice = f"{place}; --debug shows how it was called"
    else:
        advice = "this is a bug in unfog; --debug shows where"
    return f"unfog: {type(error).__name__}: {one_line(str(error))}\n({advice})\n"


def one_line(message: str) -> str:
    """Return a message in one line, with control characters escaped: file names may hold anything."""
    message = message.replace("\n", " ")
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]} ... (--debug prints all of it)"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def _prepare_streams() -> None:
    """Discard output to closed streams, and replace characters that a stream cannot encode."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


# What `unfog sample` does, by other names; the command that is spelled most alike may be another, such as `init`.
_SAMPLING_WORDS = ("inpaint", "edit", "generate", "vary", "img2img", "images")


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"unfog {__version__}\n")
        return 0
    # Imported only now, so that the above answers at once.
    from unfog.config.aliases import COMMANDS, with_old_defaults
    from unfog.config.spec_strings import quote
    from unfog.process.child import reveal_secrets
    from unfog.text import suggest

    command, *rest = reveal_secrets(words)
    command = COMMANDS.get(command, command)
    # Worker ranks get their settings from rank 0, which may know an earlier attempt that the words do not name.
    if command in _TRAINING and os.environ.get("RANK", "0") != "0":
        return _run_worker_rank(rest)
    if command == "serve" and (quick := _serve_request(rest)) is not None:
        return _import_main(command)(quick)
    from unfog.cli.read_request import REQUESTS, read_request

    if command not in REQUESTS:
        if command.startswith("-"):
            raise RequestError(
                f"{quote(command)} comes before the command; write unfog COMMAND first (see unfog --help)"
            )
        meant = "; did you mean 'sample'?" if command in _SAMPLING_WORDS else suggest(command, REQUESTS)
        raise RequestError(f"{quote(command)} is not a command{meant} (see unfog --help)")
    # Read before the command is imported, for which torch may take seconds: what is wrong is refused at once.
    request = with_old_defaults(words[0], read_request(command, rest))
    return _import_main(command)(request)


def _import_main(command: str) -> Callable[[object], int]:
    """Return the function that runs a command."""
    module = _MODULES.get(command, command.replace("-", "_"))
    main: Callable[[object], int] = import_module(f"unfog.{_LAYERS.get(command, 'commands')}.{module}").main
    return main


def _serve_request(words: list[str]) -> object | None:
    """Return the request of `unfog serve`, or None for --help and what is wrong, about which `read_request` says more.

    It needs fewer modules than `read_request`, so that the page is there sooner.
    """
    from unfog.cli.parse import parse_args
    from unfog.config.requests.runs import ServeRequest
    from unfog.config.toml import update

    try:
        args = parse_args(words, ServeRequest, "unfog serve", {})
        request: ServeRequest = update(ServeRequest(**args.named), args.table, "")
    except RequestError:
        return None
    return request


def _run_worker_rank(words: list[str]) -> int:
    """Run a rank other than 0, which gets its settings from rank 0. Return its exit status."""
    if not {"-h", "--help", "--help-all", "--verify"} & set(words):  # which train nothing
        from unfog.runs.train import run_worker

        run_worker()
    return 0
