"""Other names of commands, settings and Python arguments: old ones, which keep working, and those of other trainers.

A renamed setting is read under both names from config.toml, flags and Python. Digests of settings
(`resume_rules.settings_digests`) are computed over the old name, so that a checkpoint of an earlier version compares
equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from unfog.errors import RequestError

T = TypeVar("T")

COMMANDS = {"train-codec": "train-autoencoder"}

# Dotted names in the tree of settings, old to new.
_SETTINGS = {
    "averages": "ema_snapshots",
    "codec": "autoencoder_folder",
    "data.lost_shards": "data.failed_shards",
}

# Usual names in other trainers -> settings here. Understood from Python; the command line names the flag in its error.
USUAL = {
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size"), "training.batch"),
    **dict.fromkeys(("micro_batch_size", "microbatch_size"), "training.microbatch"),
    **dict.fromkeys(("image_size", "img_size", "resolution"), "data.size"),
    **dict.fromkeys(("horizontal_flip", "random_flip", "xflip"), "data.flip"),
    **dict.fromkeys(("learning_rate", "base_lr", "max_lr", "train_lr"), "optimizer.lr"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "num_warmup_steps", "warmup", "warm_up"), "optimizer.warmup"),
    **dict.fromkeys(("lr_schedule", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), "optimizer.weight_decay"),
    "betas": "optimizer.betas",
    **dict.fromkeys(("iterations", "max_iters", "max_steps", "num_iterations", "num_steps"), "training.steps"),
    **dict.fromkeys(
        ("max_train_steps", "num_train_steps", "total_steps", "train_num_steps", "train_steps"), "training.steps"
    ),
    **dict.fromkeys(("clipping", "clip_grad", "clip_grad_norm", "grad_clip", "max_norm"), "training.clip"),
    **dict.fromkeys(("gradient_clip", "gradient_clip_val", "gradient_clipping", "max_grad_norm"), "training.clip"),
    **dict.fromkeys(("dtype", "mixed_precision"), "training.precision"),
    "gradient_checkpointing": "training.checkpointing",
    "random_seed": "training.seed",
    "model": "network",
    **dict.fromkeys(("beta_schedule", "ddpm_beta_schedule", "noise_schedule"), "diffusion.schedule"),
    **dict.fromkeys(("parameterization", "prediction_type"), "diffusion.target"),
    **dict.fromkeys(("cfg_scale", "guidance_scale"), "guidance"),
    **dict.fromkeys(("cond_drop_prob", "class_dropout"), "label_dropout"),
    **dict.fromkeys(("checkpoint_every", "checkpointing_steps", "save_every", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("preview_every", "sample_every"), "preview.every"),
    **dict.fromkeys(("eval_every", "eval_steps", "evaluate_every"), "evaluate.every"),
    **dict.fromkeys(("log_every", "logging_steps"), "log.every"),
}

# Of arguments of `Run.sample`.
SAMPLING = {
    **dict.fromkeys(("num_images", "num_samples"), "n"),
    **dict.fromkeys(("num_inference_steps", "num_steps", "sampling_steps"), "steps"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance_scale"), "guidance"),
    "batch_size": "batch",
    "random_seed": "seed",
    "negative_prompt": "negative",
    **dict.fromkeys(("class_labels", "classes", "labels"), "label"),
}

# Usual names of the argument `out`.
OUT = ("output", "output_dir", "out_dir", "run_dir", "save_dir")
# Usual names of a length that no setting has, as it is given in steps, images or time.
EPOCHS = ("epochs", "max_epochs", "n_epoch", "n_epochs", "num_epochs", "num_train_epochs")


class Advice(NamedTuple):
    """Remedy for a word of other trainers or of a tutorial that is not a setting."""

    text: str
    settings: tuple[str, ...] = ()
    """Settings that are meant."""


_PRECISION = Advice("mixed precision is automatic; --precision fp16, bf16 or fp32 chooses it", ("training.precision",))
_NOISE_LEVELS = Advice(
    "the number of noise levels belongs to the schedule: --schedule linear:steps=1000; the number of sampling steps is "
    "--sampler.steps",
    ("diffusion.schedule", "sampler.steps"),
)
_EMA_DECAY = Advice("give --ema fixed:decay_max=0.9999", ("ema",))
_ACCUMULATION = Advice(
    "give the whole batch as --batch and what fits into memory as --microbatch; gradients are accumulated in between",
    ("training.batch", "training.microbatch"),
)
_TRACKER = Advice("give --log.sinks wandb, tensorboard, mlflow, comet or trackio", ("log.sinks",))
_WORKERS = Advice("images are decoded by as many threads as there are cores; no setting is needed", ("data.cache",))
_MIN_SNR = Advice("give --weighting min-snr:gamma=5", ("diffusion.weighting",))
_FID = Advice(
    "measure a run by unfog evaluate RUN --metrics fid,kid, and while it trains by --evaluate.metrics fid,kid; unfog "
    "docs metrics says how to get the features of the literature",
    ("evaluate.metrics",),
)
_EPOCHS = Advice(
    "training is counted in images: give --images, which is all images times the epochs, or --steps or --budget",
    ("training.images", "training.steps", "training.budget"),
)
_NAN = Advice(
    "a step whose loss or gradient is not finite is left out, and after several of them the run goes back to its last "
    "good weights; unfog doctor RUN says why",
    ("training.patience", "training.clip"),
)
_RESUME = Advice("give unfog resume RUN: the newest checkpoint has all that is needed, also the scaler of fp16")
_GUIDANCE = Advice(
    "classifier-free guidance is --guidance when sampling, and --label-dropout when training",
    ("guidance", "label_dropout"),
)
_DROPOUT = Advice(
    "dropout of the network is a part of its settings, as in --network unet:dropout=0.1; that of the labels is "
    "--label-dropout",
    ("network", "label_dropout"),
)
_FIND_LR = Advice("unfog find-lr SOURCE finds a rate on a throwaway copy, and draws the curve", ("optimizer.lr",))
_LR_SCALING = Advice(
    "the automatic learning rate grows with the square root of the batch; a linear rule suits SGD",
    ("optimizer.lr", "training.batch"),
)
_POOR = Advice("unfog doctor RUN finds the cause by its symptom; unfog docs fix-it lists symptoms and remedies")
_BY_LEVEL = Advice(
    "loss_by_level and held_out_noise_error in metrics.jsonl are the error by noise level; report.html draws them"
)
_STRIP = Advice("unfog sample RUN --strip draws the denoising of one image; previews keep one in RUN/denoising")
_MEMORY = Advice(
    "unfog plan SOURCE predicts the memory, part by part; a batch that does not fit is split automatically",
    ("training.microbatch", "training.checkpointing"),
)
_DURATION = Advice(
    "unfog plan SOURCE predicts the time, unfog doctor SOURCE says how long to train on so many images; give --budget, "
    "--images or --steps",
    ("training.budget", "training.images", "training.steps"),
)
_LOSS = Advice(
    "give --loss mse, l1 or pseudo-huber:c=0.03, and --weighting for the weight of each noise level; unfog docs "
    "objectives compares the choices",
    ("diffusion.loss", "diffusion.target", "diffusion.weighting"),
)
_INVERSE_SNR = Advice("give --weighting inverse-snr", ("diffusion.weighting",))
_SHARDS = Advice("give the shards as SOURCE: unfog train 'https://host/set-{000..099}.tar'", ("data.cache",))
_SEVERAL_GPUS = Advice("give torchrun --nproc-per-node 4 -m unfog train SOURCE; unfog docs distributed says more")
_LOADER = Advice(
    "images are shuffled in an order that follows from the position; threads and pinned memory need no setting",
    ("data.cache",),
)
_SCALING = Advice(
    "images are mapped to [-1, 1] automatically; --data.range gives the range of other values", ("data.range",)
)
_OVERFITTING = Advice(
    "the held-out loss shows it, and unfog doctor RUN reports it; give --augment 0.15, or unfog sample RUN --best",
    ("data.augment",),
)
_FLAT_LOSS = Advice(
    "unfog doctor RUN says whether the loss is stuck or only slow, and why; unfog find-lr SOURCE suggests a rate",
    ("optimizer.lr",),
)
_SAMPLING_PRECISION = Advice(
    "samples are drawn in the precision that suits the device; unfog sample RUN --precision fp32 draws in fp32"
)
_SAMPLERS = Advice(
    "unfog sample RUN --sampler unipc --steps 10 draws in few steps; ddim takes Euler steps, and ddpm is ancestral",
    ("sampler.kind", "sampler.steps"),
)
_COPIES = Advice(
    "unfog evaluate RUN searches its samples for copies of training images; on few images, train with --augment 0.15",
    ("data.augment",),
)
_LATENTS = Advice(
    "unfog train-autoencoder SOURCE learns an autoencoder; unfog train SOURCE --autoencoder RUN trains on its latents",
    ("autoencoder_folder",),
)
_LORA = Advice(
    "there is no LoRA; unfog train SOURCE --init RUN goes on from the weights of another run", ("init.folder",)
)
_PREDICTION = Advice("give --target eps, v, x0, flow or edm", ("diffusion.target",))
_CAPTIONS = Advice(
    'unfog train SOURCE --condition text learns captions, and unfog sample RUN --prompt "a red heart" draws by one',
    ("data.condition",),
)
_FILLING = Advice("unfog sample RUN --image FILE --mask FILE fills in what is white in the mask")
_EARLY_STOPPING = Advice(
    "a run keeps the checkpoint of its lowest held-out loss, and unfog sample RUN --best uses it", ("evaluate.best",)
)
_ATTENTION = Advice("attention uses the fast kernels of torch by itself; no setting is needed")
_TF32 = Advice("TF32 stays off, so that fp32 means fp32; --precision bf16 is faster", ("training.precision",))
_CROP = Advice(
    "images are resized, and their centre is cut, to --size; --data.crop 0.1 cuts at random, and --aspect keep cuts "
    "nothing",
    ("data.size", "data.crop", "data.aspect"),
)
_SOURCE = Advice(
    "the images are the first word: unfog train FOLDER, or hf:NAME for a set of the Hugging Face hub; unfog docs guide "
    "lists all sources"
)
_COLUMNS = Advice(
    "--condition names columns of a table, and the column text has the captions; classes come from sub-folders or a "
    "column label",
    ("data.condition", "data.labels"),
)
_CLASSES = Advice("sub-folders are classes, and are counted; --data.labels none leaves them out", ("data.labels",))
_LABEL_DROPOUT = Advice("give --label-dropout 0.1", ("label_dropout",))
_NETWORK = Advice(
    "the network is one word with its settings, as in --network unet:channels=64/128/256 or --network dit-base; "
    "unfog explain unet lists them",
    ("network",),
)
_BETAS = Advice(
    "they belong to the schedule: --schedule linear:steps=1000,beta_start=0.0001,beta_end=0.02", ("diffusion.schedule",)
)
_ADAM = Advice(
    "give --optimizer.betas 0.9 0.999 and --optimizer.eps 1e-8; the default is --optimizer muon, and adamw is another",
    ("optimizer.method", "optimizer.betas", "optimizer.eps"),
)
_SMALL_ADAM = Advice(
    "there is no optimizer of 8 bits; --optimizer custom:path=MODULE.CLASS takes one of another package",
    ("optimizer.method",),
)
_EMA_POWER = Advice(
    "give --ema fixed for a decay with a warm-up, or --ema power for a width; unfog explain ema compares them", ("ema",)
)
_SCHEDULER = Advice(
    "--optimizer.schedule changes the learning rate over time, --schedule sets the noise levels, and --sampler draws",
    ("optimizer.schedule", "diffusion.schedule", "sampler.kind"),
)
_INTERVALS = Advice(
    "in steps, give --log.every, --preview.every, --evaluate.every or --checkpoint.every; left open, they are chosen",
    ("log.every", "preview.every", "evaluate.every", "checkpoint.every"),
)
_KEEP = Advice("give --checkpoint.keep", ("checkpoint.keep",))
_OVERWRITE = Advice("a run is never overwritten: give another --out, or continue by unfog resume RUN")
_TOKEN = Advice("log in by `hf auth login`, or set HF_TOKEN; unfog export RUN OUT --push-to-hub NAME uploads")
_NAMES = Advice("--out names the run; WANDB_PROJECT and the like name the project of a tracker", ("log.sinks",))
_CACHE = Advice("set UNFOG_CACHE; --data.cache says what is kept there", ("data.cache",))
_ONE_DEVICE = Advice("give --device cpu, cuda, cuda:1 or mps; auto takes the GPU with the most free memory")
_SHARDED = Advice(
    "give --training.shard under torchrun, which is FSDP2; unfog docs distributed says more", ("training.shard",)
)
_PRETRAINED = Advice(
    "unfog train SOURCE --init FOLDER continues a run, or a UNet2DModel or DiT of diffusers; large text-to-image "
    "models are not fine-tuned",
    ("init.folder",),
)
_SAMPLE_COUNT = Advice(
    "unfog sample RUN -n 16 draws 16 samples; while it trains, --preview.images sets how many", ("preview.images",)
)
_NOISE_OFFSET = Advice(
    "give a schedule that ends in pure noise, as --schedule linear:zero_terminal=1 does: an offset is not needed then",
    ("diffusion.schedule",),
)
_CUDNN = Advice(
    "kernels are not chosen by their time; --training.deterministic off allows it", ("training.deterministic",)
)
_COLLAPSE = Advice(
    "samples that all look alike come from strong guidance or from few images: unfog sample RUN --guidance 1 --guide "
    "none draws without it, and unfog evaluate RUN searches for copies; unfog docs fix-it lists symptoms and remedies"
)
_HEIC = Advice(
    "HEIC, which iPhones write, is skipped and reported: convert it to JPEG or PNG first, or set the phone to JPEG "
    "(Settings, Camera, Formats, Most Compatible)"
)
_SHAPE = Advice(
    "images need not be square: without --size the shape of three quarters of them is kept, such as 3:2; --size 96x64 "
    "gives one, --size 64 crops to squares, and --aspect keep trains several shapes",
    ("data.size", "data.aspect"),
)
_PRIVACY = Advice(
    "images stay on this machine: a connection is opened only if you name a URL, a tracker or the Hub; the folder of a "
    "run and doctor/ show images and their names, so share neither if they are private"
)
_DESCRIPTION = Advice("give the folder of the run by --out, as in --out runs/first-try")
_EMA = Advice("an EMA is always kept, and samples use it; --ema fixed:decay_max=0.9999 sets its decay", ("ema",))
_COMPILE = Advice("give --compile: slow to start, faster after that on a GPU", ("training.compile",))
_CONFIG_FILE = Advice("give --config FILE.toml; unfog init writes one, and the config.toml of a run is one")
_NOISING = Advice(
    "x_t = alpha x0 + sigma eps is Diffusion.add_noise; alpha_bar is alpha^2, which the schedule sets: unfog explain "
    "schedule",
    ("diffusion.schedule", "diffusion.path"),
)
_NORM = Advice("metrics.jsonl and the page have gradient_norm, before clipping", ("training.clip",))
_JITTER = Advice("give --data.jitter 0.1", ("data.jitter",))
_LARGER = Advice("give --size 128; unfog plan SOURCE --size 128 predicts memory and time", ("data.size",))
_BACKGROUND = Advice(
    "transparent parts get the colour of --data.background: pictures are read in RGB",
    ("data.background",),
)
_PAGE = Advice("unfog serve RUNS opens the page; Draw on it draws from a run, shows every step, paints and compares")
_SYSTEM = Advice("unfog docs install says how to install on Windows, macOS and Linux; unfog doctor --gpu tests the GPU")
_RIGHTS = Advice(
    "rights in the images are yours to clear; unfog evaluate RUN searches samples for copies, and an export states a "
    "licence by --license"
)
_EDM_PRECOND = Advice(
    "--preset edm has the recipe; --target edm and --path ve are its parts", ("diffusion.target", "diffusion.path")
)

ADVICE = {
    **dict.fromkeys(
        ("amp", "use_amp", "autocast", "grad_scaler", "gradscaler", "fp16", "bf16", "half", "ls"), _PRECISION
    ),
    **dict.fromkeys(("timesteps", "t", "num_timesteps", "num_train_timesteps", "diffusion_steps"), _NOISE_LEVELS),
    **dict.fromkeys(("ema_decay", "ema_rate", "ema_beta"), _EMA_DECAY),
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",
            "gradient_accumulation",
            "accumulate_grad_batches",
            "accumulation",
            "grad_accum",
            "gradient_accumulate_every",
            "batch_gpu",
        ),
        _ACCUMULATION,
    ),
    **dict.fromkeys(("wandb", "use_wandb", "tensorboard", "mlflow", "report_to", "log_with", "logger"), _TRACKER),
    **dict.fromkeys(("num_workers", "workers", "dataloader_num_workers"), _WORKERS),
    **dict.fromkeys(("min_snr", "min_snr_gamma", "snr_gamma"), _MIN_SNR),
    **dict.fromkeys(("fid", "kid", "calculate_fid", "num_fid_samples"), _FID),
    **dict.fromkeys((*EPOCHS, "epoch"), _EPOCHS),
    **dict.fromkeys(("nan", "inf", "not_finite", "spike", "spikes", "diverges", "explodes", "exploding"), _NAN),
    **dict.fromkeys(("exploding_gradients", "gradient_explosion"), _NAN),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint", "scaler_state_dict", "checkpoint_latest"), _RESUME
    ),
    **dict.fromkeys(("cfg", "classifier_free_guidance"), _GUIDANCE),
    **dict.fromkeys(("finder", "lr_finder", "lr_find", "find_lr", "learning_rate_finder", "lr_range_test"), _FIND_LR),
    **dict.fromkeys(
        ("linear_scaling", "scale_lr", "linear_scaling_rule", "scaling_with_the_batch", "batch_and_lr"), _LR_SCALING
    ),
    **dict.fromkeys(("loss", "loss_weighting"), _LOSS),
    **dict.fromkeys(("loss_not_decreasing", "flat_loss", "loss_flat", "not_learning"), _FLAT_LOSS),
    **dict.fromkeys(("sample_in_fp32", "samples_in_fp32", "sample_fp32", "sampling_precision"), _SAMPLING_PRECISION),
    **dict.fromkeys(
        (
            "fewer_steps",
            "few_steps",
            "euler",
            "euler_a",
            "ancestral",
            "dpm++",
            "dpmsolver++",
            "plms",
            "pndm",
            "p_sample",
        ),
        _SAMPLERS,
    ),
    **dict.fromkeys(("copies", "memorization", "memorisation"), _COPIES),
    **dict.fromkeys(("vae", "latents", "latent_diffusion"), _LATENTS),
    **dict.fromkeys(("lora", "dreambooth", "rank"), _LORA),
    **dict.fromkeys(("epsilon", "v_prediction", "predict_noise", "pred_v", "pred_noise", "pred_x0"), _PREDICTION),
    **dict.fromkeys(("caption", "captions", "prompt", "prompts", "text_to_image"), _CAPTIONS),
    **dict.fromkeys(("inpaint", "inpainting"), _FILLING),
    **dict.fromkeys(("early_stopping", "save_best"), _EARLY_STOPPING),
    **dict.fromkeys(("xformers", "flash_attention", "enable_xformers_memory_efficient_attention"), _ATTENTION),
    **dict.fromkeys(("tf32", "allow_tf32"), _TF32),
    **dict.fromkeys(("center_crop", "random_crop", "random_resized_crop", "resize"), _CROP),
    **dict.fromkeys(
        (
            "data",
            "dataset",
            "dataset_name",
            "dataset_config_name",
            "train_data_dir",
            "data_dir",
            "data_path",
            "instance_data_dir",
        ),
        _SOURCE,
    ),
    **dict.fromkeys(("image_column", "caption_column", "label_column", "class_cond", "cond"), _COLUMNS),
    **dict.fromkeys(("num_classes", "n_classes"), _CLASSES),
    **dict.fromkeys(("p_uncond", "drop_prob", "uncond_prob", "proportion_empty_prompts"), _LABEL_DROPOUT),
    **dict.fromkeys(
        ("arch", "unet", "dim", "dim_mults", "hidden_dim", "base_channels", "model_channels", "num_channels"), _NETWORK
    ),
    **dict.fromkeys(("num_res_blocks", "channel_mult", "attention_resolutions", "cbase", "cres"), _NETWORK),
    **dict.fromkeys(("beta_start", "beta_end", "beta_1", "beta_t", "linear_start", "linear_end"), _BETAS),
    **dict.fromkeys(("n_t", "ddpm_num_steps", "noise_steps", "sampling_timesteps"), _NOISE_LEVELS),
    **dict.fromkeys(("ddpm_num_inference_steps", "num_inference_steps", "ddim_steps"), _SAMPLERS),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "beta1", "beta2"), _ADAM),
    **dict.fromkeys(("use_8bit_adam", "adam8bit", "use_8bit_adamw"), _SMALL_ADAM),
    **dict.fromkeys(
        ("ema_inv_gamma", "ema_power", "ema_max_decay", "ema_halflife_kimg", "ema_update_every", "ema_warmup"),
        _EMA_POWER,
    ),
    **dict.fromkeys(("scheduler", "noise_scheduler", "cosineannealinglr"), _SCHEDULER),
    **dict.fromkeys(
        ("log_interval", "save_interval", "eval_interval", "sample_interval", "tick", "snap", "dump"), _INTERVALS
    ),
    **dict.fromkeys(
        ("save_and_sample_every", "save_images_epochs", "save_model_epochs", "validation_steps"), _INTERVALS
    ),
    **dict.fromkeys(("checkpoints_total_limit", "save_total_limit", "keep_last"), _KEEP),
    **dict.fromkeys(("overwrite", "overwrite_output_dir"), _OVERWRITE),
    **dict.fromkeys(("hub_token", "hub_model_id"), _TOKEN),
    **dict.fromkeys(("name", "project", "tracker_project_name", "run_name", "exp_name", "experiment_name"), _NAMES),
    **dict.fromkeys(("logging_dir", "log_dir", "logdir", "desc"), _DESCRIPTION),
    "cache_dir": _CACHE,
    **dict.fromkeys(("cuda", "no_cuda", "gpu_id", "gpu_ids"), _ONE_DEVICE),
    **dict.fromkeys(("fsdp", "zero", "deepspeed", "shard"), _SHARDED),
    **dict.fromkeys(
        ("pretrained", "pretrained_model_name_or_path", "transfer", "variant", "revision", "fine_tune"), _PRETRAINED
    ),
    **dict.fromkeys(("num_samples", "n_samples", "num_images", "eval_batch_size", "validation_prompt"), _SAMPLE_COUNT),
    "noise_offset": _NOISE_OFFSET,
    **dict.fromkeys(("bench", "cudnn_benchmark", "benchmark"), _CUDNN),
    "precond": _EDM_PRECOND,
    **dict.fromkeys(("use_ema", "no_ema", "average_parameters"), _EMA),
    **dict.fromkeys(("torch_compile", "use_compile"), _COMPILE),
    "config_file": _CONFIG_FILE,
    **dict.fromkeys(("blurry", "noisy", "grey", "grey_images", "bad_samples", "poor_samples"), _POOR),
    **dict.fromkeys(("mode_collapse", "collapse", "all_alike"), _COLLAPSE),
    **dict.fromkeys(("heic", "heif", "iphone"), _HEIC),
    **dict.fromkeys(("square", "squares", "aspect_ratio", "landscape", "portrait"), _SHAPE),
    **dict.fromkeys(("privacy", "private", "upload", "uploaded", "telemetry"), _PRIVACY),
    **dict.fromkeys(("error_by_timestep", "loss_by_timestep", "noise_prediction_error"), _BY_LEVEL),
    **dict.fromkeys(("strip", "denoising_strip", "denoising"), _STRIP),
    **dict.fromkeys(("oom", "out_of_memory", "memory", "gpu_memory", "vram"), _MEMORY),
    **dict.fromkeys(("duration", "how_long", "length", "training_time", "how_many_images"), _DURATION),
    "1/snr": _INVERSE_SNR,
    **dict.fromkeys(("loss_type", "huber", "huber_c", "huber_loss", "l1_loss", "mse_loss", "smooth_l1"), _LOSS),
    **dict.fromkeys(("webdataset", "wds", "streaming"), _SHARDS),
    **dict.fromkeys(
        ("ddp", "torchrun", "multi_gpu", "num_gpus", "n_gpus", "gpus", "distributed", "parallel", "data_parallel"),
        _SEVERAL_GPUS,
    ),
    **dict.fromkeys(("world_size", "local_rank", "nproc_per_node", "accelerate", "distributedsampler"), _SEVERAL_GPUS),
    **dict.fromkeys(("shuffle", "pin_memory", "drop_last", "persistent_workers", "prefetch_factor"), _LOADER),
    **dict.fromkeys(("normalize", "normalise", "normalization", "rescale", "scaling", "mean", "std"), _SCALING),
    **dict.fromkeys(("q_sample", "alpha_bar", "alphas_cumprod"), _NOISING),
    **dict.fromkeys(("color_jitter", "colour_jitter"), _JITTER),
    **dict.fromkeys(("transparent", "transparency"), _BACKGROUND),
    **dict.fromkeys(("windows", "mac", "macos"), _SYSTEM),
    "gradient_norm": _NORM,
    **dict.fromkeys(("bigger_pictures", "larger_images"), _LARGER),
    "playground": _PAGE,
    "copyright": _RIGHTS,
    "overfitting": _OVERFITTING,
    "dropout": _DROPOUT,
}
"""Words, in lower case and with "_" between them."""


def advice_on(word: str) -> Advice | None:
    """Return the advice on a word as people write it, such as gradient-accumulation-steps; None without one."""
    return ADVICE.get(word.lstrip("-").lower().replace("-", "_").replace(" ", "_"))


def advice_within(phrase: str) -> Advice | None:
    """Return the advice on the longest known words in a phrase, such as "NaN loss" or "T=1000"; None without one."""
    words = re.findall(r"[a-z0-9/+]+", phrase.lower().replace("_", " "))[:12]
    parts = [words[i:j] for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    parts.sort(key=lambda part: (len(part), part != ["loss"]), reverse=True)  # "loss" says least of what is wrong
    return next((ADVICE[key] for part in parts if (key := "_".join(part)) in ADVICE), None)


def usual_arguments(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments by their names here, where `names` has them. RequestError if one is given twice."""
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        here = names.get(name, name)
        if here in renamed or (here != name and here in given):
            raise RequestError(f"{here} is given twice, once as {name}; give one of them")
        renamed[here] = value
    return renamed


def with_old_defaults(command: str, request: T) -> T:
    """Return a request with the defaults of an old name: scripts look for what train-codec made in a -codec folder."""
    return replace(request, suffix="-codec") if command == "train-codec" else request  # type: ignore[type-var]


def current_name(setting: str) -> str:
    """Return the present dotted name of a setting: "averages.every" becomes "ema_snapshots.every"."""
    return _renamed(setting, _SETTINGS)


def stored_name(setting: str) -> str:
    """Return the dotted name that digests of settings are computed over: the oldest one."""
    return _renamed(setting, {new: old for old, new in _SETTINGS.items()})


def _renamed(setting: str, names: dict[str, str]) -> str:
    for one, other in names.items():
        # With its dot, so that a setting whose name only begins with the same letters keeps it.
        if setting == one or setting.startswith(f"{one}."):
            return other + setting[len(one) :]
    return setting
