"""Push of an export to the Hugging Face Hub: checked before the export, and uploaded in one commit after it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from unfog.config.spec_strings import quote
from unfog.errors import RequestError, RunError, install_command
from unfog.reporting.progress import say
from unfog.text import sanitize

_LOGIN = "log in with `hf auth login`, or set HF_TOKEN, to a token that may write"


class Repository(NamedTuple):
    """A repository on the Hub that a folder may be pushed to; it need not exist yet."""

    api: Any
    name: str
    """OWNER/NAME."""
    public: bool

    @classmethod
    def open(cls, name: str, public: bool) -> Repository:
        """Return the repository of this name, without making it.

        Raises:
            RequestError: huggingface_hub or a token is missing, the Hub refuses the token or the name, it cannot be
                reached, or the repository is public and may not be.
        """
        try:
            from huggingface_hub import HfApi
            from huggingface_hub.errors import RepositoryNotFoundError
        except ImportError:
            raise RequestError(f"push_to_hub needs huggingface_hub: {install_command('hub')}") from None
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="unfog")
        if not api.endpoint.startswith("http"):
            raise RequestError(f"HF_ENDPOINT = {quote(api.endpoint)} is not an address of a Hub; correct it")
        try:
            name = name if "/" in name else f"{api.whoami()['name']}/{name}"
            api.whoami()
            try:
                found = api.repo_info(name)
            except RepositoryNotFoundError:
                return cls(api, name, public)
        # The errors of three HTTP libraries: huggingface_hub has changed them twice.
        except Exception as error:
            raise RequestError(f"push_to_hub = {quote(name)}: {_reason(error, api.endpoint)}") from None
        # Checked before the export, which may take minutes.
        if not found.private and not public:
            raise RequestError(
                f"push_to_hub = {quote(name)} exists and is public, and what is pushed is private unless --public is "
                "given; give that, or another name"
            )
        return cls(api, name, public)

    def upload(self, folder: Path, message: str) -> None:
        """Push a folder, in one commit: all of it or nothing. RunError if that fails; the folder stays unchanged."""
        say(f"  uploading to {self.name} ({'public' if self.public else 'private'})")
        try:
            # Private unless it was said otherwise: a person's own images may be recognised in what a network draws.
            self.api.create_repo(self.name, private=not self.public, exist_ok=True)
            self.api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        except Exception as error:
            words = ["hf", "upload", self.name, str(folder), *["--private"] * (not self.public)]
            raise RunError(
                f"{folder} is complete, but it could not be uploaded: {_reason(error, self.api.endpoint)}. Nothing is "
                f"lost; to upload it later: {shlex.join(words)}"
            ) from None
        say(f"  uploaded: {self.api.endpoint}/{self.name}")


def _reason(error: Exception, endpoint: str) -> str:
    """Return why a call of the Hub failed, and the remedy where one is known."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, LocalTokenNotFoundError):
        return f"no token of the Hub is stored here; {_LOGIN}"
    if isinstance(error, HFValidationError):
        return "this is not a name of a repository; give NAME or OWNER/NAME of letters, digits, - and ."
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE forbids it; unset that variable"
    if status == 401:
        return f"the Hub does not accept the token (401); {_LOGIN}"
    if status == 403:
        return f"the token may not write there (403); {_LOGIN}, or give a name of your own"
    text = sanitize(" ".join(str(error.__cause__ or error).split())[:300]) or type(error).__name__
    if status is None and ("Connect" in type(error).__name__ or "Timeout" in type(error).__name__):
        return f"{endpoint} cannot be reached ({text}); check the network"
    return f"the Hub answered {status}: {text}" if status else text
