"""`unfog completion`: a script by which bash, zsh or fish complete commands, flags, kinds of parts and paths.

The script holds all words, so that completing starts no Python. It is made from the request dataclasses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unfog.cli.help import first_sentence, listed_settings
from unfog.cli.read_request import REQUESTS
from unfog.config.describe import Description, describe
from unfog.config.presets import PRESETS
from unfog.config.requests.completion import SHELLS, CompletionRequest
from unfog.config.schema import Config
from unfog.reporting.progress import print_result

# Usual values of settings that take any text.
_WORDS: Mapping[str, tuple[str, ...]] = {"preset": tuple(PRESETS), "device": ("auto", "cpu", "cuda", "mps")}


@dataclass(frozen=True)
class _Flag:
    """A flag as typed, and the words that may follow it."""

    spelling: str
    values: tuple[str, ...]
    """Words to choose from; none if paths are completed."""
    takes_value: bool
    is_path: bool
    text: str


def _completion_script(shell: str) -> str:
    """Return the script for bash, zsh or fish."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _flags(command: str) -> list[_Flag]:
    """Return the flags of a command, --help included."""
    settings = [each for each in listed_settings(command, REQUESTS[command]) if not each.positional]
    flags = [_flag(each, name) for each in settings for name in each.flags]
    return [*flags, *(_Flag(name, (), False, False, "Explain the command.") for name in ("--help", "--help-all"))]


def _flag(setting: Description, name: str) -> _Flag:
    values = setting.choices or _WORDS.get(setting.path[-1], ())
    # Text without known words may be a SOURCE or a file; completing paths there is right more often than nothing.
    is_path = not values and setting.annotation in (str, Path)
    spelling = f"-{name}" if len(name) == 1 else f"--{name}"
    return _Flag(spelling, values, bool(setting.metavar), is_path, first_sentence(setting.text))


def _named() -> dict[str, tuple[str, ...]]:
    """Return command -> words that it takes without a flag, where these are not paths."""
    settings = describe(Config)
    names = dict.fromkeys([*(each.path[0] for each in settings), *(each.flags[0] for each in settings)])
    return {"explain": tuple(names), "completion": SHELLS, "slurm": ("train", "resume")}


def _about(command: str) -> str:
    return first_sentence((inspect.getdoc(REQUESTS[command]) or "").partition("\n")[0])


def _quote(text: str) -> str:
    # A typographic apostrophe instead of an escaped one, which each of the three shells writes in another way.
    return "'" + text.replace("'", "’") + "'"


def _bash() -> str:
    values, flags, named = [], [], []
    for command in REQUESTS:
        listed = _flags(command)
        flags.append(f"    {command}) words={_quote(' '.join(flag.spelling for flag in listed))} ;;")
        for flag in (each for each in listed if each.values):
            values.append(f"    {_quote(f'{command} {flag.spelling}')}) words={_quote(' '.join(flag.values))} ;;")
    named = [f"    {command}) words={_quote(' '.join(words))} ;;" for command, words in _named().items()]
    return "\n".join([
        '# Completion of unfog for bash. To load it now: eval "$(unfog completion bash)"',
        "_unfog() {",
        '  local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local command="${COMP_WORDS[1]}" words=""',
        "  COMPREPLY=()",
        '  if [[ "$cur" == "=" ]]; then cur=""',
        '  elif [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi',
        f'  if [[ "$COMP_CWORD" -eq 1 ]]; then words={_quote(" ".join([*REQUESTS, "--help", "--version"]))}',
        '  elif [[ "$cur" == -* ]]; then case "$command" in',
        *flags,
        "  esac; else",
        '  [[ "$prev" == -* ]] || case "$command" in',
        *named,
        "  esac",
        '  case "$command $prev" in',
        *values,
        "  esac; fi",
        '  [[ -z "$words" ]] || COMPREPLY=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -o bashdefault -o default -F _unfog unfog",
    ])  # fmt: skip


def _zsh() -> str:
    about = " ".join(_quote(f"{command}:{_about(command)}") for command in REQUESTS)
    values, flags = [], []
    for command in REQUESTS:
        listed = _flags(command)
        flags.append(f"      {command}) compadd -- {' '.join(flag.spelling for flag in listed)} ;;")
        for flag in (each for each in listed if each.values):
            values.append(f"    {_quote(f'{command} {flag.spelling}')}) compadd -- {' '.join(flag.values)}; return ;;")
    named = [f"      {command}) compadd -- {' '.join(words)}; return ;;" for command, words in _named().items()]
    return "\n".join([
        "#compdef unfog",
        '# Completion of unfog for zsh. To load it now: eval "$(unfog completion zsh)"',
        "_unfog() {",
        f"  local -a commands=({about})",
        "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
        '  case "${words[2]} ${words[CURRENT-1]}" in',
        *values,
        "  esac",
        '  if [[ "${words[CURRENT]}" == -* ]]; then',
        '    case "${words[2]}" in',
        *flags,
        "    esac",
        "    return",
        "  fi",
        '  if [[ "${words[CURRENT-1]}" != -* ]]; then',
        '    case "${words[2]}" in',
        *named,
        "    esac",
        "  fi",
        "  _files",
        "}",
        'if [[ "${funcstack[1]}" == _unfog ]]; then _unfog "$@"; else compdef _unfog unfog; fi',
    ])  # fmt: skip


def _fish() -> str:
    lines = ["# Completion of unfog for fish. To load it now: unfog completion fish | source"]
    for command in REQUESTS:
        lines.append(f"complete -c unfog -n __fish_use_subcommand -f -a {command} -d {_quote(_about(command))}")
    for command in REQUESTS:
        start = f"complete -c unfog -n '__fish_seen_subcommand_from {command}'"
        for flag in _flags(command):
            name = flag.spelling.lstrip("-")
            takes = " -r" if flag.is_path else " -x" if flag.takes_value else ""
            takes += f" -a {_quote(' '.join(flag.values))}" if flag.values else ""
            lines.append(f"{start} {'-s' if len(name) == 1 else '-l'} {name}{takes} -d {_quote(flag.text)}")
    for command, words in _named().items():
        lines.append(f"complete -c unfog -n '__fish_seen_subcommand_from {command}' -f -a {_quote(' '.join(words))}")
    return "\n".join(lines)


def main(request: CompletionRequest) -> int:
    """Print the script. Return the exit status."""
    print_result(_completion_script(request.shell))
    return 0
