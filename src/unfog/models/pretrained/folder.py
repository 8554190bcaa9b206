"""A local folder of Hugging Face: its configuration, its digest, and loading without pickles and code of the folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from unfog.errors import RequestError, install_command
from unfog.files.safe_files import LARGEST_TEXT, file_digest, read_file
from unfog.text import sanitize

_FILES = ("*.json", "*.txt", "*.model", "*.safetensors")  # that a model and its tokenizer are made of
# Files of which a tokenizer is made. Without any, transformers may make one to which each word is unknown.
_TOKENIZERS = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("vocab.txt",), ("*.model",))
_WITHOUT_FILES = ("ByT5Tokenizer",)  # whose tokens are bytes
# Weights that may be missing: poolings that an encoder of tokens does not use, and numbers that are computed.
_SPARE = ("pooler", "position_ids")


class PretrainedFolder(NamedTuple):
    """A folder that a setting names."""

    setting: str
    """Name of the setting, for errors."""
    path: Path
    models: str
    """What may be in the folder, for errors: "a CLIP or SigLIP model"."""

    def refused(self, why: str) -> RequestError:
        """Return the error that says why the folder is not read."""
        return RequestError(
            f"{self.setting} = {sanitize(str(self.path))}: {why}; give a local folder of Hugging Face with "
            f"config.json, *.safetensors and a tokenizer, of {self.models}"
        )

    def check_installed(self) -> None:
        """Raise RequestError if transformers, which loads the folder, is not installed."""
        if find_spec("transformers") is None:
            raise RequestError(f"{self.setting} needs transformers: {install_command('text')}")

    def config(self, kinds: Collection[str]) -> tuple[str, dict[str, Any]]:
        """Return the type of the model, and its configuration. RequestError if the type is not one of `kinds`."""
        config = self.read_json("config.json")
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in kinds:
            raise self.refused(f"its model_type is {str(kind)[:40]!r}, and we read {', '.join(kinds)}")
        if not any(self.path.glob("*.safetensors")):
            raise self.refused("it has no *.safetensors, and a pickle (*.bin) is not loaded, as it may run code")
        if not self._has_tokenizer():
            raise self.refused("it has no tokenizer: tokenizer.json, vocab.json and merges.txt, vocab.txt or *.model")
        return kind, config

    def _has_tokenizer(self) -> bool:
        if any(all(any(self.path.glob(name)) for name in files) for files in _TOKENIZERS):
            return True
        return self.read_json("tokenizer_config.json", optional=True).get("tokenizer_class") in _WITHOUT_FILES

    def read_json(self, name: str, optional: bool = False) -> dict[str, Any]:
        """Return the object in a JSON file of the folder; {} if it holds another value, or is missing and `optional`.

        RequestError if it cannot be read.
        """
        try:
            found = json.loads(read_file(self.path / name, self.path, LARGEST_TEXT, follow=True))
        except (OSError, ValueError, RecursionError) as error:
            if optional and isinstance(error, FileNotFoundError):
                return {}
            raise self.refused(f"its {name} cannot be read ({error})") from None
        return found if isinstance(found, dict) else {}

    def digest(self) -> str:
        """Return the sha256 of the files of the model: their names and contents."""
        digest = hashlib.sha256()
        try:
            for file in sorted({file for pattern in _FILES for file in self.path.glob(pattern)}):
                # A snapshot of the Hub's cache has links to files beside it.
                digest.update(f"{file.name} {file_digest(file.resolve(), file.resolve().parent)}\n".encode())
        except OSError as error:
            raise self.refused(f"it cannot be read ({error})") from None
        return digest.hexdigest()

    def load(self, name: str) -> tuple[nn.Module, Any]:
        """Return the model, of the class of transformers called `name`, frozen and in float32, and its tokenizer.

        RequestError if transformers is not installed or cannot load them, or weights are missing.
        """
        self.check_installed()
        import transformers

        safely = {"local_files_only": True, "trust_remote_code": False}
        # It draws bars, and lists the weights of a whole model that one half does not use.
        logging = transformers.utils.logging
        bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            model, found = getattr(transformers, name).from_pretrained(
                self.path, use_safetensors=True, output_loading_info=True, **safely
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.path, **safely)
        except Exception as error:  # of a stranger's files; the library raises many kinds
            if isinstance(error, ImportError) and "SentencePiece" in str(error):
                raise RequestError(f"{self.setting} needs sentencepiece: {install_command('text')}") from error
            reason = " ".join(str(error).split())[:200]
            raise self.refused(f"transformers cannot load it ({type(error).__name__}: {reason})") from error
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
        # transformers gives missing weights random values, with a warning alone.
        missing = sorted(key for key in found["missing_keys"] if not any(part in key for part in _SPARE))
        if missing:
            raise self.refused(f"it lacks weights of {name}, such as {sanitize(missing[0])}")
        return model.eval().float().requires_grad_(False), tokenizer
