"""Checks of the doctor in order: of images, settings and machine before a run, of a run, or of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from unfog.checks.gpu_checks import check_gpu
from unfog.checks.images.image_checks import check_images
from unfog.checks.run.run_checks import check_run
from unfog.checks.settings.length_checks import training_length_guide
from unfog.checks.settings.overfit_one_batch import overfit_one_batch
from unfog.checks.settings.settings_checks import check_settings
from unfog.config.requests.doctor import DoctorRequest
from unfog.config.schema import Config
from unfog.config.validate import check_out, check_request
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.data.packs.pack import Pack
from unfog.errors import RequestError
from unfog.pipeline.build import build_state
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.load_data import load_images
from unfog.planning.auto_settings import AutoSettings
from unfog.process.device import choose_device
from unfog.process.run_folder import RunFolder, next_folder
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.findings import Figure, Finding, print_findings, write_findings
from unfog.reporting.progress import Progress, format_duration, say
from unfog.runs.dry_run_checks import Trial, check_dry_run
from unfog.runs.evaluation_hook import resolve_metrics
from unfog.text import manual, sanitize


@caller_flags_kept()
def doctor(request: DoctorRequest) -> tuple[Path, list[Finding]]:
    """Check images, settings and machine before a run, a run, or a GPU. Return the page and the findings."""
    if request.gpu:
        return _check_gpu(request)
    run, config = RunFolder(Path(request.source)), request.settings
    is_run = run.claims_to_be_one
    place = str(run.path) if is_run else config.source
    if is_run:
        run.check_is_run()
    else:
        check_request(config)
    page = request.out or next_folder(place, "doctor")  # outside the run, which another process may be writing
    check_out(page, "" if is_run else place, "the folder of the findings")
    with StopSignals(saves=False) as stop:
        if is_run:
            findings = check_run(run, config.training.device, samples=0 if request.quick else 64)
        else:
            findings = _check_source(config, stop, request.quick)
    _show(findings)
    title = f"Checks of {place}" if is_run else f"Checks before training on {sanitize(place)}"
    return write_findings(page, title, findings), findings


def _show(findings: list[Finding], fine: bool = False) -> None:
    """Print the findings, and the page that helps with them if one is not fine."""
    print_findings(findings, fine)
    if any(finding.severity != "fine" for finding in findings):
        say(f"  causes and remedies: {manual('docs/fix-it.md')}")


def _check_gpu(request: DoctorRequest) -> tuple[Path, list[Finding]]:
    page = request.out or next_folder("gpu", "doctor")
    check_out(page, "", "the folder of the findings")
    with StopSignals(saves=False) as stop:
        findings = check_gpu(request.settings, stop)
    _show(findings, fine=True)  # what a person asks for, even where all is well
    return write_findings(page, "Checks of the GPU", findings), findings


def _check_source(config: Config, stop: StopSignals, quick: bool) -> list[Finding]:
    device = choose_device(config.training.device)
    prepared, facts = load_images(config, stop)
    config = config.adopt(facts)
    findings = _check_source_images(prepared, config, stop)
    return findings + _check_planned_run(prepared, config, device, stop, quick)


def _check_source_images(prepared: Dataset, config: Config, stop: StopSignals) -> list[Finding]:
    """Check the images, and show them as the network sees them."""
    with Progress("checking images", None) as progress:
        update = stop.watching(progress)
        findings = check_images(prepared, config, update)
        if Pack.is_at(Path(config.source)):
            findings.append(_check_pack(Path(config.source), update))
    seen = contact_sheet(prepared, Augment.from_settings(config.data), config.training.seed)
    changed = "Some are changed by --augment, as in training; samples do not show it." if config.data.augment else ""
    sheet = Figure("Contact sheet", seen, caption=changed)
    return [*findings, Finding("data.seen", "fine", "the contact sheet shows the network's input", figures=(sheet,))]


def _check_pack(path: Path, progress: Callable[[int, int], None]) -> Finding:
    """Check the checksums of a pack."""
    troubles = Pack.verify(path, progress)
    if not troubles:
        return Finding("data.pack", "fine", f"the checksums of {path} are right")
    said = f"{path} is damaged: {'; '.join(troubles[:3])}{'; ...' * (len(troubles) > 3)}"
    return Finding("data.pack", "fatal", said, "pack the originals again with `unfog pack`", {"troubles": troubles})


def _check_planned_run(
    prepared: Dataset, config: Config, device: torch.device, stop: StopSignals, quick: bool
) -> list[Finding]:
    """Check that the settings suit the images, then each of them, the length, and a batch."""
    one_size = prepared.of_one_size
    auto = AutoSettings(config, one_size.as_network_input.train, device, stop)
    auto.is_hasty = True
    try:
        auto.resolve()
        resolve_metrics(auto, one_size.train, device)
    except RequestError as error:  # the settings do not suit these images
        return [Finding("settings.request", "fatal", str(error))]
    for choice in auto.choices:
        say(f"  {choice}")
    config, pace = auto.config, auto.seconds_per_step()
    if (doubt := auto.doubt_of_pace) and not any(doubt in choice.reason for choice in auto.choices):
        say(f"  a step takes {format_duration(pace)}: {doubt}")
    findings = check_settings(config, prepared, device, pace)
    if findings[0].severity != "fatal":
        findings.append(training_length_guide(config, prepared, pace, auto.doubt_of_pace))
        if not quick:
            state, images = build_state(config, device), one_size.as_network_input.train
            trial = Trial.of(config, len(prepared.held_out), pace)
            said = f"about {format_duration(trial.seconds)}" if trial.seconds else "as long as a few steps"
            say(f"  overfitting eight images takes up to 20 s, trying every part of a run {said}; --quick does neither")
            findings.append(overfit_one_batch(config, state, images, stop))
            findings += check_dry_run(trial, prepared, device, stop)
    return findings
