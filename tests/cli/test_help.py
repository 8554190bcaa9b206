"""What helps to find a setting: --help, --help-all, explain, completion and init."""

import ast
import io
import re
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import unfog
from package_source import trees
from unfog.cli.help import PAGES
from unfog.cli.main import main
from unfog.cli.parse import flags_of, parse_args
from unfog.cli.read_request import REQUESTS, read_request
from unfog.config.advice import advice_on, advice_within, all_advice
from unfog.config.aliases import EPOCHS, USUAL
from unfog.config.describe import describe
from unfog.config.explain import explain
from unfog.config.presets import PRESETS, autoencoder_recipe, preset
from unfog.config.requests.evaluate import METRICS
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import SHORT, Config
from unfog.config.spec_strings import registry_of
from unfog.config.toml import from_toml, read_toml, to_toml, update
from unfog.data.settings import TRAINING_ONLY, Data
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.pipeline.pack import pack
from unfog.runs.start import add_autoencoder
from unfog.settings import argument, rules_of, setting

REPOSITORY = Path(__file__).parents[2]

TRAINING = ("train", "resume", "train-autoencoder", "doctor", "plan", "find-lr")


@pytest.fixture
def said(capsys, monkeypatch):
    """Runs a command, and returns what it prints; it must end with this status."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        output = capsys.readouterr()
        assert left.value.code == status, output.err
        return output.out if status == 0 else output.err

    return run


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--?([a-z][a-z.-]*)", "\n".join(re.findall(r"^  -.*", text, re.MULTILINE))))


def test_the_help_of_evaluate_names_every_metric(said):
    assert {*METRICS} <= {*re.findall(r"\w+", said("evaluate", "--help"))}


@pytest.mark.parametrize("command", TRAINING)
def test_help_is_one_screen_with_examples_and_leads_to_the_rest(said, command):
    text = said(command, "--help")
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 80
    assert f"\n  unfog {command} " in text
    assert "--help-all" in text
    assert 5 <= len(flags_in(text)) <= 25
    assert flags_in(text) < flags_in(said(command, "--help-all"))


def test_help_all_has_every_flag_with_its_default(said):
    text = said("train", "--help-all")
    assert {flag for each in describe(REQUESTS["train"]) if not each.positional for flag in each.flags} == flags_in(
        text
    )
    assert "unfog.train" not in text
    words = " ".join(text.split())
    assert "--optimizer.warmup N Steps of linear rise" in words
    assert "(default: cosine)" in words
    assert "--sampler.no-clip" in words


@pytest.mark.parametrize("command", sorted(set(REQUESTS) - set(TRAINING)))
def test_other_commands_have_one_level(said, command):
    assert said(command, "--help") == said(command, "--help-all")


@pytest.mark.parametrize("command", sorted(PAGES))
def test_help_ends_with_the_page_of_the_command(said, command):
    assert (REPOSITORY / PAGES[command]).is_file()
    for flag in ("--help", "--help-all"):
        last = said(command, flag).splitlines()[-1]
        assert last.startswith("Its page: ")
        assert Path(PAGES[command]).stem in last


def test_every_setting_has_a_text():
    for kind in REQUESTS.values():
        for each in describe(kind):
            assert len(each.text) > 3, (kind, each.path)


def test_resume_lists_only_what_a_resume_can_change(said):
    flags = flags_in(said("resume", "--help-all"))
    assert {"lr", "steps", "force", "seed", "network", "checkpoint.every"} <= flags
    for fixed in ("size", "data.size", "path", "target", "init", "autoencoder", "diffusion.sigma-data", "batch"):
        assert fixed not in flags, fixed


def test_resume_lists_first_what_changes_without_force(said):
    flags = flags_in(said("resume", "--help"))
    assert {"lr", "steps", "budget", "force", "source"} <= flags
    assert not {"seed", "network", "size"} & flags
    text = " ".join(said("resume", "--help-all").split())
    assert "order of images, noise and dropout. Needs --force." in text


def test_an_autoencoder_lists_only_what_it_reads(said, tmp_path):
    flags = flags_in(said("train-autoencoder", "--help-all"))
    assert {"factor", "lr", "evaluate.images"} <= flags
    assert not any(flag.startswith(("ema-snapshots", "sampler", "data.labels")) for flag in flags)
    config = replace(add_autoencoder(autoencoder_recipe()), source="photos")
    (tmp_path / "config.toml").write_text(to_toml(config))
    resumed = flags_in(said("resume", str(tmp_path), "--help-all"))
    assert {"lr", "evaluate.images"} <= resumed
    assert not any(flag.startswith(("ema-snapshots", "sampler", "guidance", "label-dropout")) for flag in resumed)


def test_pack_lists_only_what_it_reads(said):
    flags = flags_in(said("pack", "--help"))
    assert {"size", "data.held-out", "data.labels"} <= flags
    for name in TRAINING_ONLY:
        assert f"data.{name.replace('_', '-')}" not in flags


@pytest.mark.parametrize("name", sorted(TRAINING_ONLY))
def test_pack_refuses_what_it_does_not_read(name):
    words = {"cache": "none", "cache_limit": "1gb", "flip": True, "aspect": "keep", "map": "minmax"}
    other = (words | {"map_values": (0.0, 1.0, 1.0), "map_range": (0.0, 1.0)}).get(name, 0.02)
    with pytest.raises(RequestError, match="acts during training"):
        pack(PackRequest("fashion", Path("out"), Data(**{name: other})))


def test_only_switches_of_settings_have_an_opposite_in_the_help(said):
    for command, switch in (("runs", "json"), ("cache", "clear"), ("evaluate", "best"), ("init", "yes")):
        text = said(command, "--help")
        assert f"\n  --{switch}\n" in text
        assert f"no-{switch}" not in text
    assert "--no-store" in said("tune", "--help")


# Flags of torchrun, EDM, wandb and the like, and halves of names that are put together.
OTHERS = {
    "codec", "no", "query-gpu", "private", "append", "nproc-per-node", "max-restarts", "arch", "cbase", "cres",
    "help", "help-all", "version", "debug", "local-dir",
}  # fmt: skip


@pytest.mark.slow
def test_every_flag_that_a_message_names_exists():
    known = OTHERS | {flag for kind in REQUESTS.values() for each in describe(kind) for flag in each.flags}
    unknown = []
    for place, tree in trees().items():
        if Path(place).name == "slurm_job.py":  # a batch file with flags of five other programs
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "--" in node.value:
                named = re.findall(r"(?<![\w/-])--([a-z][a-z0-9.-]*[a-z0-9])", node.value)
                unknown += [f"{place}:{node.lineno}: --{flag}" for flag in named if flag not in known]
    assert not unknown


def test_the_marks_of_a_field_make_its_flag():
    @dataclass(frozen=True)
    class Marked:
        run: Path = field(metadata=argument("RUN"))
        device: str = setting("", flag="for", metavar="DEVICE")
        words: tuple[str, ...] = setting((), hidden=True)
        n: int = 4

    listed = describe(Marked)
    assert [(each.metavar, each.positional) for each in listed] == [("RUN", True), ("DEVICE", False), ("N", False)]
    assert [each.flags for each in listed[1:]] == [["for"], ["n"]]
    args = parse_args(["a run", "--for", "h200", "-n", "2"], Marked, "unfog marked", {})
    assert (args.named, args.table) == ({"run": Path("a run")}, {"device": "h200", "n": 2})
    with pytest.raises(RequestError, match="--words is not a flag"):
        parse_args(["a run", "--words", "x"], Marked, "unfog marked", {})
    with pytest.raises(RequestError, match="RUN is missing"):
        parse_args([], Marked, "unfog marked", {})


def test_short_names_and_descriptions_agree():
    described = {flag: each.setting for each in describe(Config) for flag in each.flags}
    assert all(described[short] == place for short, place in SHORT.items())


def test_explain_tells_all_that_a_field_holds(said):
    text = " ".join(said("explain", "lr").split())
    for part in (
        "optimizer.lr Peak learning rate",
        "--lr, --optimizer.lr NUMBER",
        "lr, below [optimizer]",
        "default auto, written as 0; 0.0002 with --preset ddpm",
        "at least 0; usual: 1e-4 to 6e-3",
        "on resume can change",
        "why 0.003 suits a million parameters",
        "measured Fréchet distance",
        "decisions/0007-default-recipe",
    ):
        assert part in text
    assert "cannot change, but for dropout" in said("explain", "network")
    assert "with --force" in said("explain", "seed")
    assert "Karras et al. 2022, appendix F" in said("explain", "data.augment")
    assert said("explain", "held_out") == said("explain", "data.held-out")
    assert said("explain", "learning-rate") == said("explain", "lr")


def test_explain_says_that_the_default_is_chosen_and_breaks_no_path(said, monkeypatch):
    warmup = " ".join(said("explain", "warmup").split())
    assert "default auto, written as 0 allowed" in warmup
    path = f"/{'x' * 120}/page.md"
    monkeypatch.setattr("unfog.config.explain.manual", lambda page: path)
    assert path in said("explain", "lr")


@pytest.mark.slow
def test_explain_knows_every_setting_section_and_kind(said):
    overview = said("explain")
    for each in describe(Config):
        assert each.setting in explain(each.setting).splitlines()
        assert {each.path[0], each.path[-1]} <= set(re.findall(r"\w+", overview))
        assert f"  {each.setting} " in explain(each.path[0]) or len(each.path) == 1
        for word in each.choices if registry_of(each.annotation) else ():
            assert word == "auto" or word in explain(word)
    assert "did you mean lr" in said("explain", "lrr", status=2)
    assert "a choice of --weighting" in said("explain", "min-snr")


WORDS = {
    "amp": "precision", "mixed-precision": "precision", "accumulation": "microbatch", "gradient clipping": "clip",
    "warm-up": "warmup", "ema_decay": "decay_max", "epochs": "--images", "timesteps": "linear:steps",
    "T": "linear:steps", "num_workers": "threads", "fid": "evaluate", "nan": "doctor", "wandb": "--log.sinks",
    "cfg": "--guidance",
    "min_snr_gamma": "min-snr", "dropout": "dropout",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_words_of_other_trainers_are_explained_and_are_flags_that_are_answered(said, word):
    assert WORDS[word] in said("explain", word)
    flag = f"--{word.replace(' ', '-')}"
    assert WORDS[word] in said("train", "fashion", flag, "1", status=2)


# Flags of the training scripts of diffusers, EDM and denoising-diffusion-pytorch, and a word of the answer.
FLAGS = {
    "--train_batch_size": "--batch?", "--learning_rate": "--lr?", "--resolution": "--size?",
    "--center_crop": "--aspect", "--random_flip": "--flip?", "--max_train_steps": "--steps?",
    "--checkpointing_steps": "--checkpoint.every?", "--resume_from_checkpoint": "unfog resume",
    "--enable_xformers_memory_efficient_attention": "no setting", "--allow_tf32": "--precision",
    "--report_to": "--log.sinks", "--lr_scheduler": "--optimizer.schedule?",
    "--lr_warmup_steps": "--optimizer.warmup?", "--use_ema": "--ema", "--noise_offset": "zero_terminal",
    "--dataset_name": "hf:NAME", "--train_data_dir": "FOLDER", "--output_dir": "--out?",
    "--adam_beta1": "--optimizer.betas", "--use_8bit_adam": "custom:path", "--ema_max_decay": "--ema",
    "--ddpm_num_steps": "linear:steps", "--ddpm_beta_schedule": "--schedule?",
    "--checkpoints_total_limit": "--checkpoint.keep", "--hub_token": "HF_TOKEN", "--outdir": "--out",
    "--batch-gpu": "--microbatch", "--cbase": "--network", "--arch": "--network", "--xflip": "--flip?",
    "--ls": "--precision", "--bench": "--training.deterministic", "--tick": "--log.every",
    "--snap": "--checkpoint.every", "--transfer": "--init", "--train_num_steps": "--steps?", "--train_lr": "--lr?",
    "--dim_mults": "--network", "--gradient_accumulate_every": "--microbatch",
    "--save_and_sample_every": "--preview.every", "--gpus": "torchrun", "--local_rank": "torchrun",
    "--deepspeed": "--training.shard", "--beta_start": "beta_start=", "--num_classes": "Sub-folders",
    "--scheduler": "--sampler", "--num_samples": "unfog sample", "--cuda": "--device", "--name": "--out",
}  # fmt: skip


# Words after `unfog`, and what the answer says. Advice for training alone is not given elsewhere.
ELSEWHERE = {
    "evaluate RUN --fid": "; measure a run by unfog evaluate RUN --metrics fid,kid",
    "sample RUN --num-samples 4": "; did you mean -n?",
    "sample RUN --euler": "; unfog sample RUN --sampler unipc --steps 10",
    "sample RUN --fp16": "; mixed precision is automatic; --precision fp16",
    "sample RUN --num-workers 2": "; see unfog sample --help",
    "evaluate RUN --kimg 100": "; see unfog evaluate --help",
}


@pytest.mark.parametrize("words", ELSEWHERE)
def test_flags_of_other_programs_that_do_not_train_are_answered(said, words):
    assert ELSEWHERE[words] in said(*words.split(), status=2)


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_training_scripts_are_answered(said, flag):
    answer = said("train", "fashion", flag, "1", status=2)
    assert f"{flag} is not a flag of unfog train; " in answer
    assert FLAGS[flag].lower() in answer.lower().partition(" is not a flag of unfog train; ")[2]


# Concepts of a tutorial, as a student writes them, and a word of the answer.
CONCEPTS = {
    "EMA": "power:width", "GradScaler": "--precision", "warm-up": "5%", "clipping": "training.clip",
    "gradient accumulation": "--microbatch", "checkpoint": "checkpoint.every", "LR finder": "find-lr",
    "loss weighting": "diffusion.weighting", "1/SNR": "inverse-snr", "DDIM": "a choice of --sampler",
    "fewer steps": "--steps 10", "FID": "--metrics", "NaN loss": "doctor RUN", "loss not decreasing": "find-lr",
    "my samples are blurry": "fix-it", "denoising strip": "--strip", "error by timestep": "loss_by_level",
    "memory": "unfog plan", "duration": "unfog plan", "scaling with the batch": "square root",
    "T=1000": "linear:steps=1000", "scaling to [-1, 1]": "automatically", "sample in fp32": "--precision fp32",
    "wandb": "--log.sinks", "webdataset": "SOURCE", "num_workers": "threads", "multi-GPU": "torchrun",
    "finder": "find-lr", "epoch": "--images", "mode collapse": "--guidance 1", "HEIC": "JPEG",
    "square": "--aspect keep", "privacy": "images stay on this machine", "upload": "a connection is opened only if",
    "loss spikes": "not finite", "exploding gradients": "not finite", "gradient clip": "training.clip",
    "max norm": "training.clip", "gradient norm": "gradient_norm", "color jitter": "--data.jitter",
    "CosineAnnealingLR": "optimizer.schedule", "average_parameters": "an EMA is always", "ema warmup": "--ema fixed",
    "DistributedSampler": "torchrun", "q_sample": "add_noise", "p_sample": "--sampler", "alpha_bar": "alpha^2",
    "sample_fp32": "--precision fp32", "scaler_state_dict": "scaler", "checkpoint_latest": "unfog resume",
    "caption": "--prompt", "fine-tune": "--init", "playground": "unfog serve", "how many images": "unfog doctor",
    "bigger pictures": "--size", "copyright": "copies", "windows": "install", "mac": "install",
    "transparent": "--data.background", "lr scaling": "square root", "learning rate scaling": "square root",
    "batch size scaling": "square root", "square root": "square root", "timestep loss": "loss_by_level",
    "timestep error": "loss_by_level", "error by noise level": "loss_by_level", "clip": "--training.clip",
    "inception": "unfog docs metrics", "lpips": "not measured", "velocity": "--target flow",
    "flow matching": "--target flow", "rectified flow": "--target flow", "autoguidance": "--guide none",
    "preemption": "SIGTERM", "divergence": "not finite", "inverse snr": "--weighting inverse-snr",
    "--output-dir": "--out", "--kimg": "--images", "[-1, 1]": "automatically", "images in [0, 1]": "automatically",
    "scale to [-1, 1]": "automatically", "crop 0.1": "--data.crop", "loss stuck": "stuck or only slow",
    "loss_high": "stuck or only slow", "intermediate timesteps": "--strip", "noise prediction": "--target eps",
    "learning rate too high": "find-lr", "learning rate too low": "find-lr", "grad_norm": "gradient_norm",
    "save_grid": "grid.png", "random horizontal flip": "--flip", "randint": "random noise level",
    "state_dict": "unfog resume", "tqdm": "unfog watch", "V100": "--for v100", "unscale_": "loss scaler",
    "loss scaling": "loss scaler", "is it a copy": "copies", "how many drawings": "unfog doctor",
    "colour": "--channels sets it", "style": "--strength", "my drawings": "unfog train FOLDER",
    "negative prompt": '--negative "dark"', "validation": "--data.held-out", "sampling steps": "--steps 10",
}  # fmt: skip


@pytest.mark.parametrize("concept", CONCEPTS)
def test_concepts_of_a_tutorial_are_explained(concept):
    assert CONCEPTS[concept] in " ".join(explain(concept).split())


# What people who begin ask, as they ask it, and a word of the answer.
QUESTIONS = {
    "bit depth": "uint16", "image width": "need not be square",
    "grad norm": "gradient_norm", "how many pictures": "unfog plan", "how long": "unfog plan", "too blurry": "fix-it",
    "why grey": "fix-it", "my pictures are gray": "fix-it", "colors wrong": "fix-it", "only noise": "fix-it",
    "why is it so slow": "slows a run down", "loss goes up": "stuck or only slow", "loss not going down": "find-lr",
    "how big a batch": "training.batch", "picture size": "data.size", "learning rate too high": "optimizer.lr",
    "learning rate schedule": "optimizer.schedule", "previews": "preview.every", "logs": "log.every",
    "how do I stop it": "Ctrl-C", "continue training": "unfog resume", "use my gpu": "--device", "save": "saves itself",
    "where are the samples": "samples/", "generate images": "unfog sample", "data augmentation": "data.augment",
    "train test split": "data.held_out", "class conditional": "sub-folders", "photos from my phone": "HEIC",
    "same picture": "--guidance 1", "disk space": "unfog cache", "export": "--format", "super resolution": "pairs",
    "img2img": "--strength", "bigger network": "unet:channels", "best settings": "--preset", "adam": "adamw",
    "number of images": "unfog plan", "few images": "--augment 0.15", "compare runs": "unfog serve",
    "python": "unfog.train", "memorize": "copies", "fine tuning": "--init", "grayscale": "data.channels",
    "16 bit": "data.dtype", "slurm": "slurm",
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_of_people_who_begin_are_answered(question):
    assert QUESTIONS[question] in " ".join(explain(question).split())


# Phrases that are not known whole: what is taken of them, and a word of its explanation.
IN_PART = {
    "kernel size": ("size", "data.size"), "stochastic depth": ("depth", "dit:depth="),
    "gradient penalty": ("gradient", "gradient_norm"), "seed everything": ("seed", "training.seed"),
    "Where is the checkpoint of a colleague?": ("checkpoint", "checkpoint.every"),
}  # fmt: skip


@pytest.mark.parametrize("phrase", IN_PART)
def test_what_is_taken_of_an_unknown_phrase_is_said(phrase):
    taken, answer = IN_PART[phrase]
    first, _, rest = explain(phrase).partition("\n\n")
    assert first == f"no entry for {phrase!r}; nearest: {taken}"
    assert answer in rest


# Phrases of tutorials and of the table of words, each known whole.
WHOLE = {
    "steps per second": "images_per_second", "batch norm": "RMSNorm", "group norm": "SiLU", "adam betas": "betas",
    "exponential moving average": "an EMA is always kept", "log SNR": "log(alpha^2", "share of noise": "pure noise",
    "EMA snapshot": "ema_snapshots", "rollback checkpoint": "last good weights", "held-out images": "data.held_out",
    "batch size too big": "unfog plan", "cosine learning rate": "optimizer.schedule", "duplicate images": "doctor",
    "learning rate warmup": "optimizer.warmup", "inception score": "not measured", "inverse problems": "restoring",
    "number of epochs": "counted in images", "blurry samples": "fix-it", "compute FID": "unfog evaluate",
    "memory per image": "unfog plan",
}  # fmt: skip


@pytest.mark.parametrize("phrase", WHOLE)
def test_phrases_that_people_bring_are_known_whole(phrase):
    text = " ".join(explain(phrase).split())
    assert WHOLE[phrase] in text
    assert not text.startswith("no entry")


def test_what_everything_is_about_is_no_answer():
    with pytest.raises(RequestError, match="'tokens per image' is not a setting or a known word"):
        explain("tokens per image")


def test_each_word_has_one_advice_and_what_is_unknown_has_none():
    entries = tomllib.loads((Path(unfog.__file__).parent / "config/advice.toml").read_text("utf-8"))["advice"]
    words = [word for entry in entries for word in entry["words"].split()]
    assert len(words) == len({*words}) == len(all_advice())
    assert {*EPOCHS} < {*words}
    assert {*words}.isdisjoint(USUAL)  # a usual name leads to its setting, from the command line too
    for word in words:
        if word[-1] != "_":
            assert advice_on(word) is advice_within(word)[1] is all_advice()[word]
    for unknown in ("", "cats and dogs", "optimizer.lrr", "the of and"):
        assert advice_within(unknown) is None
    with pytest.raises(RequestError, match="not a setting or a known word"):
        explain("cats and dogs")


@pytest.mark.parametrize("flag", ["--num-epochs", "--amp", "--lr", "--wandb", "--pqrst"])
def test_a_flag_that_explain_does_not_have_is_the_word(said, flag):
    status = 2 if flag == "--pqrst" else 0
    assert said("explain", flag, status=status) == said("explain", "--", flag, status=status)
    assert "usage: unfog explain" in said("explain", flag, "--help")


MISSPELLED = {
    "mode colapse": "mode-collapse", "Privcy": "privacy", "--min_snrr": "min-snr", "divergance": "divergence",
    "optimizer.lrr": "optimizer.lr",
}  # fmt: skip


@pytest.mark.parametrize("word", MISSPELLED)
def test_a_word_with_a_wrong_letter_is_explained(word):
    first, _, rest = explain(word).partition("\n\n")
    assert first == f"{word!r} is read as {MISSPELLED[word]}"
    assert rest == explain(MISSPELLED[word])


@pytest.mark.parametrize(("word", "near"), [("hiec", "heic"), ("prvcy", "privacy")])
def test_near_words_of_another_one_can_be_explained(said, word, near):
    words = said("explain", word, status=2).rpartition("did you mean ")[2].strip().removesuffix("?").split(" or ")
    assert near in words
    assert all(explain(one) for one in words)


def test_advice_names_commands_flags_and_pages_that_exist():
    flags = {flag for request in REQUESTS.values() for flag in flags_of(request)}
    for word, given in all_advice().items():
        assert {*re.findall(r"(?<=unfog )[a-z-]+", given.text)} <= {*REQUESTS}, word
        assert {*re.findall(r"--[a-z][\w.-]*\w", given.text)} - {"--nproc-per-node"} <= flags, word
        assert all(
            (REPOSITORY / f"docs/{page}.md").is_file() for page in re.findall("unfog docs ([a-z-]+)", given.text)
        )
        assert {*given.settings} <= {each.setting for each in describe(Config)}, word


@pytest.mark.parametrize("name", ["ddpm", "ddim", "heun", "dpmpp", "dpmpp-sde", "unipc", "adaptive", "edm"])
def test_samplers_and_presets_are_explained(said, name):
    text = said("explain", name)
    assert "a choice of --sampler" in text
    own = dict(rules_of(Sampler.__dataclass_fields__["kind"]).choices)[name]
    assert text.partition("a choice of --sampler\n\n")[2].startswith(f"  {own[:60]}"), (
        "each has its own text, below its name"
    )
    assert ("a choice of --preset" in text) == (name in PRESETS)


def test_explanations_name_files_that_exist_and_figures_that_they_hold():
    for each in describe(Config):
        if each.rules.measured:
            text = " ".join((REPOSITORY / each.rules.see).read_text().split())
            for figure in re.findall(r"\d+\.\d+", each.rules.measured):
                assert figure in text or f"{float(figure) * 1000:.4g}" in text, (each.setting, figure)
        if each.rules.see:
            assert (REPOSITORY / each.rules.see).is_file()


COMPLETED = [
    ("unfog tr", {"train", "train-autoencoder"}),
    ("unfog train --network di", {"diffusers-dit", "dit", "dit-tiny", "dit-small", "dit-base"}),
    ("unfog train photos --preset e", {"edm"}),
    ("unfog train photos --optimizer.w", {"--optimizer.warmup", "--optimizer.weight-decay"}),
    ("unfog resume runs/a --size", set()),
    ("unfog train --sampler.no", {"--sampler.no-clip"}),
    ("unfog sample runs/a --weights ", {"ema", "raw"}),
    ("unfog completion z", {"zsh"}),
    ("unfog explain optimizer.w", {"optimizer.warmup", "optimizer.weight-decay"}),
]


def in_shell(shell: str, script: str, folder: Path) -> str:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    with redirect_stdout(io.StringIO()) as script_of_shell, pytest.raises(SystemExit):
        main(["completion", shell])
    (folder / "unfog").write_text(script_of_shell.getvalue())
    plain = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    words = [program, *plain, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=300, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def test_bash_completes_commands_flags_kinds_and_paths(tmp_path):
    script = ["source ./unfog"]
    for line, _ in COMPLETED:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        script += [f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _unfog; echo ${{COMPREPLY[@]}}"]
    script += ["COMP_WORDS=(unfog train --network = dit-b); COMP_CWORD=4; _unfog; echo ${COMPREPLY[@]}"]
    lines = in_shell("bash", "; ".join([*script, "complete -p unfog"]), tmp_path).splitlines()
    for (line, expected), found in zip(COMPLETED, lines):
        assert set(found.split()) == expected, line
    assert lines[-2] == "dit-base"
    assert "-o default" in lines[-1]  # paths, if there are no words


def test_fish_completes_the_same(tmp_path):
    lines = [f"echo (complete -C '{line}' | string replace -r '\\t.*' '')" for line, _ in COMPLETED]
    found = in_shell("fish", "; ".join(["source ./unfog", *lines]), tmp_path)
    for (line, expected), words in zip(COMPLETED, found.splitlines()):
        assert set(words.split()) == expected, line


def test_zsh_completes_the_same(tmp_path):
    stubs = [
        "compdef() { }",
        'compadd() { shift; print -r -- "$@" }',
        '_describe() { print -r -- "${(@P)2%%:*}" }',
        "_files() { print }",
        "source ./unfog",
    ]
    calls = []
    for line, _ in COMPLETED:
        quoted = " ".join(f"'{word}'" for word in line.split(" "))
        calls.append(f"words=({quoted}); CURRENT={len(line.split(' '))}; _unfog")
    found = in_shell("zsh", "\n".join([*stubs, *calls]), tmp_path).splitlines()
    for (line, expected), words in zip(COMPLETED, found):  # zsh itself picks those that begin as the word does
        assert {word for word in words.split() if word.startswith(line.split(" ")[-1])} == expected, line


@pytest.mark.slow
def test_completion_needs_no_torch_and_names_the_shells_that_it_knows(said):
    code = "import sys, unfog.cli.main as m; m._run(['completion', 'bash']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=300)
    assert "bash, zsh, fish" in said("completion", "tcsh", status=2)


def test_init_writes_a_file_that_train_accepts(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    (tmp_path / "photos" / "cats" / "1.PNG").write_bytes(b"")
    assert said("init", "--yes") == "unfog train photos --config photos.toml\n"
    text = (tmp_path / "photos.toml").read_text()
    config = read_toml(tmp_path / "photos.toml", preset("default").without_length())
    assert config == update(preset("default"), {"training": {"budget": "1h"}}, "")
    # What is written as a comment is accepted as it stands too.
    assert from_toml(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE), preset("default")) == config
    assert "# lr = 0" in text
    assert "# Peak learning rate." in text
    assert "photos.toml exists" in said("init", "--yes", status=2)
    request = read_request("train", ["fashion", "--config", "photos.toml"])
    assert request.settings.training.budget == "1h"


def test_init_asks_five_questions_and_repeats_what_it_cannot_use(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    answers = ["nowhere", "fashion", "huge", "33000", "32", "soon", "90m", "", "gpu", "cpu"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(answers) + "\n"))
    with pytest.raises(SystemExit) as left:
        main(["init", "new.toml"])
    asked = capsys.readouterr().err
    assert left.value.code == 0
    assert [len(re.findall(rf"^.*{n}/5  ", asked, re.MULTILINE)) for n in range(1, 6)] == [2, 3, 2, 1, 2]
    config = read_toml(tmp_path / "new.toml", preset("default"))
    assert (config.data.size, config.data.labels) == (32, "auto")
    assert (config.training.budget, config.training.device) == ("90m", "cpu")


def test_init_without_a_terminal_takes_flags_or_says_what_to_give(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "give --yes" in said("init", status=2)
    assert not list(tmp_path.iterdir())
    flags = "--source fashion --size 64 --budget 2h --classes none --device cpu"
    said("init", "a.toml", *flags.split())
    assert "size = 64" in (tmp_path / "a.toml").read_text()
    assert "budget = " in said("init", "b.toml", "--yes", "--budget", "2 years", status=2)
