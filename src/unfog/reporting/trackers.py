"""The trackers: TensorBoard, Weights & Biases, MLflow, trackio and Comet; and how one is opened, also your own.

The record on disk is authoritative. A tracker may raise any exception; the Recorder then drops it. Each package is
imported only where its tracker is opened.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unfog.custom import PREFIX, resolve_path
from unfog.files.safe_files import LARGEST_TEXT, make_folder, read_file, write_atomic
from unfog.reporting.records import flatten
from unfog.reporting.tracker_base import Tracker
from unfog.text import without_secrets

if TYPE_CHECKING:
    from unfog.reporting.image_grids import Pixels


class _TensorBoard(Tracker):
    """Event files in RUN/tensorboard, written without TensorFlow and without torch."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._histogram = Event, Summary, HistogramProto
        make_folder(run_dir / "tensorboard", run_dir)  # TensorBoard writes new files into it, by name
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if start:
            # What torch calls purge_step: TensorBoard forgets what it read from this step on.
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=start + 1, session_log=log))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])

    def log_histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        limits = _edges(values)[1:]
        # Where TensorBoard expects counts; it draws fractions of them too.
        bars = self._histogram(min=0, max=1, num=sum(values), bucket_limit=limits, bucket=values)
        self._add(step, [self._summary.Value(tag=name, histo=bars)])

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        from unfog.reporting.image_grids import encode_png

        height, width, _ = pixels.shape
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_png(pixels))
        self._add(step, [self._summary.Value(tag=name, image=image)])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[object]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a kill loses nothing that a resume would not write again


class _WandB(Tracker):
    """A W&B run in RUN/wandb, under one id for the life of the run.

    Offline unless WANDB_MODE says otherwise. A resume offline begins another folder with the same id, which
    `wandb sync --append` joins; online, W&B itself goes on, and passes over the steps that it has already.
    """

    name = "wandb"
    again = "keeps the earlier record of each online, and both offline"

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        offline = "WANDB_MODE" not in os.environ
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or it would call home when it fails
        import wandb

        _silence_handlers(logging.getLogger("wandb"))
        self._module: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "unfog"),
            name=run_dir.resolve().name,
            id=_stored_id(run_dir, "wandb", _new_id),
            dir=run_dir,
            mode="offline" if offline else None,
            resume="allow",
            config=dict(config),
            # The URL of a git repository may have a token in it.
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        self._run.log({name: self._module.Histogram(np_histogram=(list(values), _edges(values)))}, step=step)

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        self._run.log({name: self._module.Image(np.ascontiguousarray(pixels))}, step=step)

    def close(self) -> None:
        self._run.finish()


def _silence_handlers(logger: logging.Logger) -> None:
    """Let a logger drop lines that its log file does not take, without a traceback on the terminal for each."""
    add = logger.addHandler

    def add_silent(hdlr: logging.Handler) -> None:
        hdlr.handleError = lambda record: None  # type: ignore[method-assign]
        add(hdlr)

    logger.addHandler = add_silent  # type: ignore[method-assign]


class _MLflow(Tracker):
    """An MLflow run, in RUN/mlflow/mlruns or at MLFLOW_TRACKING_URI. MLflow has no histograms.

    The local store is one of files, as that of SQLite takes 30 MB of packages and ten seconds to begin.
    """

    name = "mlflow"
    again = "has both records of each"

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            make_folder(run_dir / "mlflow" / "mlruns", run_dir)
            _keep_inside(run_dir / "mlflow" / "mlruns", run_dir)
            uri = (run_dir.resolve() / "mlflow" / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # without which MLflow refuses it
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        def create() -> str:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME", "unfog")
            known = self._client.get_experiment_by_name(project)
            experiment = known.experiment_id if known else self._client.create_experiment(project)
            run = self._client.create_run(experiment, run_name=run_dir.resolve().name).info.run_id
            # Of the beginning only, as MLflow lets no parameter change; the artifact has what a resume changed.
            params = iter([Param(key, str(value)[:6000]) for key, value in flatten(config)])
            while some := list(islice(params, 100)):  # MLflow takes no more at once
                self._client.log_batch(run, params=some)
            return str(run)

        self._metric, self._client = Metric, MlflowClient(uri)
        self._run = _stored_id(run_dir, "mlflow", create)
        self._client.update_run(self._run, status="RUNNING")
        self._client.log_dict(self._run, dict(config), "config.json")

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in values.items()])

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        self._client.log_image(self._run, np.ascontiguousarray(pixels), key=name, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _keep_inside(store: Path, run_dir: Path) -> None:
    """Write into a local store of MLflow that its files are in it, and refuse links in it with OSError.

    It names their places in full. One that was copied names the old ones, and one of a stranger any place of this
    machine or of the network, where MLflow would write.
    """
    import yaml  # type: ignore[import-untyped, import-not-found, unused-ignore]

    for place, folders, files in os.walk(store):
        for name in (*folders, *files):
            if os.path.islink(path := os.path.join(place, name)):
                raise OSError(f"{path} is a link, which MLflow would follow")
        file = Path(place, "meta.yaml")
        if not file.is_file():
            continue
        facts = yaml.safe_load(read_file(file, run_dir, LARGEST_TEXT))
        there = Path(place).resolve()
        places = {"artifact_uri": (there / "artifacts").as_uri(), "artifact_location": there.as_uri()}
        named = {key: uri for key, uri in places.items() if key in facts and facts[key] != uri}
        if named:
            write_atomic(file, yaml.safe_dump(facts | named).encode(), run_dir)


class _Trackio(_WandB):  # whose functions have the names of those of W&B
    """A trackio run, where trackio keeps all: in TRACKIO_DIR, or in its folder in the cache of Hugging Face.

    trackio finds a run by its name, so that holds an id.
    """

    name = "trackio"
    again = _MLflow.again

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        with redirect_stdout(io.StringIO()):  # it prints what docs/trackers.md says
            import trackio

            self._module = trackio
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "unfog"),
                name=f"{run_dir.resolve().name}-{_stored_id(run_dir, 'trackio', _new_id)}",
                config=dict(flatten(config)),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._module.finish()  # not that of the run, or trackio finishes it again at exit


class _Comet(Tracker):
    """A Comet experiment under one key for the life of the run, in archives in RUN/comet.

    Offline unless COMET_START_ONLINE is set. Each resume offline writes another archive, which `comet upload` joins.
    """

    name = "comet"
    again = _MLflow.again

    def __init__(self, run_dir: Path, start: int, config: Mapping[str, object]) -> None:
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # or its import patches other libraries
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "ERROR")
        online = "COMET_START_ONLINE" in os.environ
        if not online:
            os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
        import comet_ml

        self._experiment = comet_ml.start(
            project_name=os.environ.get("COMET_PROJECT_NAME", "unfog"),
            experiment_key=_stored_id(run_dir, "comet", lambda: uuid.uuid4().hex),
            mode="get_or_create",
            online=None if online else False,
            experiment_config=comet_ml.ExperimentConfig(
                name=run_dir.resolve().name,
                offline_directory=str(run_dir / "comet"),
                # Nothing but what the methods log: no source, environment, arguments or output.
                log_code=False,
                log_graph=False,
                parse_args=False,
                log_git_metadata=False,
                log_git_patch=False,
                log_env_details=False,
                auto_output_logging=False,
                display_summary_level=0,
            ),
        )
        self._experiment.log_parameters(dict(flatten(config)))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(values), step=step)

    def log_histogram(self, step: int, name: str, values: Sequence[float]) -> None:
        # A curve, as Comet's histograms count in whole numbers.
        centres = [(low + high) / 2 for low, high in pairwise(_edges(values))]
        self._experiment.log_curve(name, x=centres, y=list(values), step=step)

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        from PIL import Image

        self._experiment.log_image(Image.fromarray(pixels), name=name, step=step)  # an array would need matplotlib

    def close(self) -> None:
        self._experiment.end()


_BUILT_IN = {tracker.name: tracker for tracker in (_TensorBoard, _WandB, _MLflow, _Trackio, _Comet)}


def open_tracker(name: str, run_dir: Path, start: int, config: Mapping[str, object]) -> Tracker:
    """Open the tracker called `name` for a run that goes on after `start` steps. May raise any Exception."""
    create = resolve_path(name, "a tracker") if name.startswith(PREFIX) else _BUILT_IN[name]
    with _arguments_without_secrets():
        tracker: Tracker = create(run_dir, start, config)
    return tracker


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Remove credentials from the arguments of this process, which W&B stores, and has no setting to leave out."""
    words = sys.argv
    sys.argv = [without_secrets(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _stored_id(run_dir: Path, folder: str, create: Callable[[], str]) -> str:
    """The id in the file RUN/folder/id, or a new one, stored there."""
    path = run_dir / folder / "id"
    make_folder(path.parent, run_dir)  # the tracker writes into it by name
    if not os.path.lexists(path):
        write_atomic(path, create().encode(), run_dir)
    found = read_file(path, run_dir, LARGEST_TEXT).decode()
    if re.fullmatch("[0-9a-zA-Z]{1,64}", found) is None:  # trackers make paths of it
        raise ValueError(f"{path} holds no id of a tracker; remove it for a new one")
    return found


def _edges(values: Sequence[float]) -> list[float]:
    return [float(edge) for edge in np.linspace(0, 1, len(values) + 1)]
