"""Request of `unfog completion`: the shell to complete commands in."""

from __future__ import annotations

from dataclasses import dataclass, field

from unfog.config.spec_strings import quote
from unfog.errors import RequestError
from unfog.settings import argument

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class CompletionRequest:
    """Print a script by which SHELL completes commands, flags, names of networks and the like, and paths.

      unfog completion bash > ~/.local/share/bash-completion/completions/unfog
      unfog completion zsh > ~/.zfunc/_unfog      where ~/.zfunc is in $fpath
      unfog completion fish > ~/.config/fish/completions/unfog.fish

    It works in shells that are started afterwards.
    """

    shell: str = field(metadata=argument("SHELL"))
    """bash, zsh or fish."""

    def __post_init__(self) -> None:
        if self.shell not in SHELLS:
            raise RequestError(f"shell = {quote(self.shell)} is not supported; give {', '.join(SHELLS)}")
