"""Requests from the arguments of Python: settings by name, and images that are given as objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unfog.errors import RequestError

if TYPE_CHECKING:
    from unfog.config.requests.train import TrainAutoencoderRequest
    from unfog.config.schema import Config
    from unfog.data.settings import Data

# Modules are imported inside functions, so that `import unfog` is quick.

_AUTOENCODER_FLAGS = ("factor", "channels", "width", "kl", "pyramid")


class _SupportsArray(Protocol):
    """A NumPy array, a tensor, or any other object that NumPy can convert."""

    def __array__(self) -> Any: ...


class _Indexed(Protocol):
    """A dataset that gives an image, or an image and its label, for each number."""

    def __getitem__(self, index: Any, /) -> Any: ...

    def __len__(self) -> int: ...


PathLikeText = str | PathLike[str]
Source = PathLikeText | _SupportsArray | _Indexed | Iterable[Any]


def check_one_process(command: str, argument: str) -> None:
    """Raise RequestError in a script that torchrun has started on several ranks: only commands join ranks.

    Otherwise each rank would begin a separate run in the same folder. The error names `command` and its `argument`.
    """
    if (ranks := os.environ.get("WORLD_SIZE", "1")) == "1":
        return
    raise RequestError(
        f"WORLD_SIZE = {ranks}, but unfog.{command.replace('-', '_')} trains on one process; replace the script in "
        f"the torchrun command by `-m unfog {command} {argument}`, or start the script without torchrun"
    )


def training_settings(source: Source, preset: str, settings: dict[str, Any]) -> Config:
    """Return the preset, changed by settings that are given by name; images as objects are stored first."""
    from dataclasses import replace

    from unfog.config.named_code import consent_to_settings
    from unfog.config.presets import preset as recipe
    from unfog.config.schema import nest_settings
    from unfog.models.given_network import GivenNetwork
    from unfog.runs.start import base_settings, new_run_settings

    labels = _pop_labels(source, settings)
    conditions, counts = _pop_conditions(source, settings)
    for name in ("init", "autoencoder", "codec", "mirror"):
        if isinstance(settings.get(name), PathLike):
            settings[name] = path_of(settings[name], name)
    for name in ("network", "model"):
        if GivenNetwork.accepts(settings.get(name)):
            # Before nesting, which works on texts and tables.
            settings[name] = GivenNetwork.of(settings[name])
    changes = nest_settings(settings)
    consent_to_settings(changes)
    config = new_run_settings(base_settings(recipe(preset), None, changes), changes, "")
    place = stored_source(source, labels, config.data, conditions)  # last, as it may take long
    _check_counts(counts, place, config.data)
    return replace(config, source=place)


def autoencoder_request(source: Source, out: PathLikeText | None, settings: dict[str, Any]) -> TrainAutoencoderRequest:
    """Return the request of flags of `unfog train-autoencoder` and settings of `unfog train`, given by name."""
    from dataclasses import replace

    from unfog.config.named_code import consent_to_settings
    from unfog.config.presets import AutoencoderRunSettings, autoencoder_recipe
    from unfog.config.requests.train import TrainAutoencoderRequest
    from unfog.config.schema import nest_settings
    from unfog.runs.start import new_run_settings

    folder = out_path(out, settings)
    options = {name: settings.pop(name) for name in _AUTOENCODER_FLAGS if name in settings}
    labels = _pop_labels(source, settings)
    changes = nest_settings(settings)
    consent_to_settings(changes)
    config = new_run_settings(autoencoder_recipe(), changes, "")
    place = stored_source(source, labels, config.data)
    own = AutoencoderRunSettings.of(replace(config, source=place))
    return TrainAutoencoderRequest(place, own, out=folder, **options)


def adopt_network(config: Config, network: object) -> None:
    """Use an object as the network of a run that was trained with one like it. RequestError if it is another."""
    from unfog.config.spec_strings import quote
    from unfog.models.given_network import GivenNetwork

    if not GivenNetwork.accepts(network):
        raise RequestError(f"network = {quote(network)} is not a torch.nn.Module; the network of a run cannot change")
    if not isinstance(config.network, GivenNetwork):
        kind = "its own" if config.network is None else f"the network {config.network.kind}"
        raise RequestError(f"this run has {kind}, which its settings describe; leave network out")
    config.network.adopt(network)


def stored_source(
    source: Any, labels: Any = None, data: Data | None = None, conditions: Mapping[str, Any] | None = None
) -> str:
    """Return SOURCE as text; images that are given as objects are written to the cache, with labels and conditions.

    `data` are the settings of the run that are about the values of arrays.
    """
    if isinstance(source, str | PathLike):
        from unfog.custom import consent

        consent.give_to_source(source)
        return path_of(source, "source")
    from unfog.data.settings import Data, parse_condition
    from unfog.data.sources.image_objects import Storing
    from unfog.data.sources.stored_images import Report, StoredImages
    from unfog.reporting.progress import Progress, say

    with Progress("storing images", None) as progress:
        data = data or Data()
        table, wanted = parse_condition(data.condition)
        columns = () if table else tuple(wanted)
        report = Report(say, progress.set)
        return str(StoredImages.store(source, labels, report, Storing.of(data), conditions, columns))


def path_of(given: object, name: str = "path") -> str:
    """Return a path as text. Raise RequestError if it is not a path."""
    from unfog.config.validate import path_text

    return path_text(given, name)


def folder_of(given: object, name: str) -> Path:
    """Return the path of a folder or file to write. Raise RequestError if it is not a path on a disk."""
    from unfog.config.validate import folder_path

    return folder_path(given, name)


def out_path(out: PathLikeText | None, settings: dict[str, Any]) -> Path | None:
    """Return the folder to write to, also by a usual name among the settings, such as output_dir; None without."""
    from unfog.config.aliases import OUT, usual_arguments

    given = {name: settings.pop(name) for name in OUT if name in settings} | ({} if out is None else {"out": out})
    place = usual_arguments(given, dict.fromkeys(OUT, "out")).get("out")
    return None if place is None else folder_of(place, "out")


def _pop_labels(source: object, settings: dict[str, Any]) -> Any:
    """Take the labels of images that are objects out of the settings; a text is a setting, as with a path."""
    if isinstance(source, str | PathLike) or isinstance(settings.get("labels"), str):
        return None
    return settings.pop("labels", None)


def _pop_conditions(source: object, settings: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """Remove `conditions`, values by name of column, from the settings, and name its columns in `condition`.

    Returns the values to store with images that are objects, in their order, and the number of images of each other
    column. Those, and values of files (given by name), are written into the cache. RequestError for other values.
    """
    from unfog.data.columns.given import columns_by_name, store_images, store_table

    conditions = settings.pop("conditions", None)
    if conditions is None:
        return {}, {}
    columns = columns_by_name(conditions)
    given = settings if "condition" in settings else settings.get("data", {})
    named = given.get("condition", "") if isinstance(given, Mapping) else ""
    counts = dict[str, int]()
    if isinstance(source, str | PathLike):
        others, condition = dict[str, Any](), store_table(columns, named)
    else:
        others, condition = store_images(columns, named)
        counts = {name: len(values) for name, values in columns.items() if name not in others}
    if condition != named:
        settings["condition"] = condition
        if given is not settings and named:
            settings["data"] = {name: value for name, value in given.items() if name != "condition"}
    return others, counts


def _check_counts(counts: Mapping[str, int], place: str, data: Data) -> None:
    """Raise RequestError unless each of these conditions has as many images as the source at `place`."""
    if not counts:
        return
    from unfog.data.sources.registry import open_source

    images = len(open_source(place, axes=data.axes).names)
    for name, count in counts.items():
        if count != images:
            raise RequestError(
                f"the condition {name} has {count:,} images, and there are {images:,} to train on; give one for each"
            )
