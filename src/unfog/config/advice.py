"""Advice on words that are no settings: of other trainers, of tutorials, and of people who begin."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from unfog.config.aliases import EPOCHS


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

_SLOW = Advice("unfog doctor RUN finds what slows a run down, and unfog docs fix-it lists causes of a slow run")
_STOP = Advice("Ctrl-C saves and stops a run; unfog resume RUN continues it where it stopped")
_SAVING = Advice("a run saves itself at intervals, and when it is stopped", ("checkpoint.every", "checkpoint.keep"))
_PLACES = Advice(
    "a run is a folder with samples/, report.html and checkpoints/; unfog runs lists those in runs, and --out names one"
)
_DRAW = Advice("unfog sample RUN -n 16 draws images from a run; unfog docs sampling says more")
_REPEAT = Advice(
    "the same command and --seed train the same model on the same machine", ("training.seed", "training.deterministic")
)
_HELD_OUT = Advice(
    "--data.held-out 0.05 keeps a share of the images from training; held_out_loss is measured on them",
    ("data.held_out",),
)
_AUGMENTATION = Advice(
    "--augment 0.15 moves, turns and stretches images without an effect on samples; --flip, --data.crop and "
    "--data.jitter change what samples look like",
    ("data.augment", "data.flip", "data.crop", "data.jitter"),
)
_MIRRORED = Advice("give --flip if mirrored images make sense", ("data.flip",))
_GREY = Advice("give --channels 1 for grey, 3 for RGB; left open, the images decide", ("data.channels",))
_FORMATS = Advice(
    "a folder of JPEG, PNG, WebP or TIFF files is read as it is; unfog docs guide lists all sources, unfog docs arrays "
    "is on NumPy, HDF5 and Zarr, unfog docs microscopy-and-medical on DICOM, NIfTI and FITS"
)
_VIDEO = Advice("unfog sample RUN --animate FILE.gif shows how noise becomes images; there is no training on videos")
_DISK = Advice(
    "unfog plan SOURCE predicts the disk space, --checkpoint.keep limits it, and unfog cache makes room",
    ("checkpoint.keep",),
)
_EXPORT = Advice("give unfog export RUN OUT --format diffusers, safetensors, onnx, pt2 or denoiser")
_RESTORE = Advice(
    "unfog docs image-conditions is on training with pairs of images, such as small and large ones; unfog docs "
    "inverse-problems on restoring images with a run that knows no such pairs"
)
_VARY = Advice("unfog sample RUN --image FILE --strength 0.4 varies an image; unfog docs editing says more")
_TRANSFORMER = Advice("--network dit-base is a transformer over patches: unfog explain dit", ("network",))
_OPTIMIZERS = Advice(
    "--optimizer adamw or muon; another as --optimizer custom:path=torch.optim.SGD", ("optimizer.method",)
)
_START = Advice(
    "unfog train FOLDER trains, and unfog sample RUN draws; unfog docs guide says more, and unfog docs "
    "how-a-run-works follows one image through a run"
)
_COMPARE = Advice("unfog serve RUNS compares runs on a page, and unfog runs lists them")
_PROGRESS = Advice("unfog watch RUN shows a run as it trains; unfog serve RUNS and report.html draw its curves")
_FEW_IMAGES = Advice(
    "unfog doctor SOURCE says what so many images are enough for; few are soon memorized, so give --augment 0.15",
    ("data.augment",),
)

_PRESETS = Advice(
    "settings left open are chosen for the images and the machine; --preset edm, ddpm or demo takes another recipe; "
    "unfog plan SOURCE shows what is chosen"
)
_PYTHON = Advice("in Python, unfog.train and unfog.Run do what the commands do; unfog docs python says more")
_CLUSTER = Advice("unfog slurm train SOURCE writes a batch file; unfog docs distributed is on several machines")
_DEPTH = Advice("--data.dtype uint16 keeps values of 16 bits; unfog docs arrays says more", ("data.dtype",))

_WORDS = (
    (_PRECISION, "amp use_amp autocast grad_scaler gradscaler fp16 bf16 half ls"),
    (_NOISE_LEVELS, "timesteps t num_timesteps num_train_timesteps diffusion_steps n_t ddpm_num_steps noise_steps"),
    (_NOISE_LEVELS, "sampling_timesteps"),
    (_EMA_DECAY, "ema_decay ema_rate ema_beta"),
    (_ACCUMULATION, "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulation"),
    (_ACCUMULATION, "grad_accum gradient_accumulate_every batch_gpu"),
    (_TRACKER, "wandb use_wandb tensorboard mlflow report_to log_with logger"),
    (_WORKERS, "num_workers workers dataloader_num_workers"),
    (_MIN_SNR, "min_snr min_snr_gamma snr_gamma"),
    (_FID, "fid kid calculate_fid num_fid_samples"),
    (_EPOCHS, " ".join((*EPOCHS, "epoch"))),
    (_NAN, "nan inf not_finite spike spikes diverges explodes exploding exploding_gradients gradient_explosion"),
    (_RESUME, "resume resume_from resume_from_checkpoint scaler_state_dict checkpoint_latest"),
    (_GUIDANCE, "cfg classifier_free_guidance"),
    (_FIND_LR, "finder lr_finder lr_find find_lr learning_rate_finder lr_range_test"),
    (_LR_SCALING, "linear_scaling scale_lr linear_scaling_rule scaling_with_the_batch batch_and_lr"),
    (_LOSS, "loss loss_weighting loss_type huber huber_c huber_loss l1_loss mse_loss smooth_l1"),
    (_FLAT_LOSS, "loss_not_decreasing flat_loss loss_flat not_learning"),
    (_SAMPLING_PRECISION, "sample_in_fp32 samples_in_fp32 sample_fp32 sampling_precision"),
    (_SAMPLERS, "fewer_steps few_steps euler euler_a ancestral dpm++ dpmsolver++ plms pndm p_sample"),
    (_SAMPLERS, "ddpm_num_inference_steps num_inference_steps ddim_steps"),
    (_COPIES, "copies memorization memorisation"),
    (_LATENTS, "vae latents latent_diffusion"),
    (_LORA, "lora dreambooth rank"),
    (_PREDICTION, "epsilon v_prediction predict_noise pred_v pred_noise pred_x0"),
    (_CAPTIONS, "caption captions prompt prompts text_to_image"),
    (_FILLING, "inpaint inpainting"),
    (_EARLY_STOPPING, "early_stopping save_best"),
    (_ATTENTION, "xformers flash_attention enable_xformers_memory_efficient_attention"),
    (_TF32, "tf32 allow_tf32"),
    (_CROP, "center_crop random_crop random_resized_crop resize"),
    (_SOURCE, "data dataset dataset_name dataset_config_name train_data_dir data_dir data_path instance_data_dir"),
    (_COLUMNS, "image_column caption_column label_column class_cond cond"),
    (_CLASSES, "num_classes n_classes"),
    (_LABEL_DROPOUT, "p_uncond drop_prob uncond_prob proportion_empty_prompts"),
    (_NETWORK, "arch unet dim dim_mults hidden_dim base_channels model_channels num_channels num_res_blocks"),
    (_NETWORK, "channel_mult attention_resolutions cbase cres"),
    (_BETAS, "beta_start beta_end beta_1 beta_t linear_start linear_end"),
    (_ADAM, "adam_beta1 adam_beta2 adam_epsilon beta1 beta2"),
    (_SMALL_ADAM, "use_8bit_adam adam8bit use_8bit_adamw"),
    (_EMA_POWER, "ema_inv_gamma ema_power ema_max_decay ema_halflife_kimg ema_update_every ema_warmup"),
    (_SCHEDULER, "scheduler noise_scheduler cosineannealinglr"),
    (_INTERVALS, "log_interval save_interval eval_interval sample_interval tick snap dump save_and_sample_every"),
    (_INTERVALS, "save_images_epochs save_model_epochs validation_steps"),
    (_KEEP, "checkpoints_total_limit save_total_limit keep_last"),
    (_OVERWRITE, "overwrite overwrite_output_dir"),
    (_TOKEN, "hub_token hub_model_id"),
    (_NAMES, "name project tracker_project_name run_name exp_name experiment_name"),
    (_DESCRIPTION, "logging_dir log_dir logdir desc"),
    (_CACHE, "cache_dir"),
    (_ONE_DEVICE, "cuda no_cuda gpu_id gpu_ids"),
    (_SHARDED, "fsdp zero deepspeed shard"),
    (_PRETRAINED, "pretrained pretrained_model_name_or_path transfer variant revision fine_tune"),
    (_SAMPLE_COUNT, "num_samples n_samples num_images eval_batch_size validation_prompt"),
    (_NOISE_OFFSET, "noise_offset"),
    (_CUDNN, "bench cudnn_benchmark benchmark"),
    (_EDM_PRECOND, "precond"),
    (_EMA, "use_ema no_ema average_parameters average_weights"),
    (_COMPILE, "torch_compile use_compile"),
    (_CONFIG_FILE, "config_file"),
    (_POOR, "blurry noisy grey grey_images bad_samples poor_samples"),
    (_COLLAPSE, "mode_collapse collapse all_alike"),
    (_HEIC, "heic heif iphone"),
    (_SHAPE, "square squares aspect_ratio landscape portrait"),
    (_PRIVACY, "privacy private upload uploaded telemetry"),
    (_BY_LEVEL, "error_by_timestep loss_by_timestep noise_prediction_error"),
    (_STRIP, "strip denoising_strip denoising"),
    (_MEMORY, "oom out_of_memory memory gpu_memory vram"),
    (_DURATION, "duration how_long length training_time how_many_images"),
    (_INVERSE_SNR, "1/snr"),
    (_SHARDS, "webdataset wds streaming"),
    (_SEVERAL_GPUS, "ddp torchrun multi_gpu num_gpus n_gpus gpus distributed parallel data_parallel world_size"),
    (_SEVERAL_GPUS, "local_rank nproc_per_node accelerate distributedsampler"),
    (_LOADER, "shuffle pin_memory drop_last persistent_workers prefetch_factor"),
    (_SCALING, "normalize normalise normalization rescale scaling mean std"),
    (_NOISING, "q_sample alpha_bar alphas_cumprod"),
    (_JITTER, "color_jitter colour_jitter"),
    (_BACKGROUND, "transparent transparency"),
    (_SYSTEM, "windows mac macos"),
    (_NORM, "gradient_norm"),
    (_LARGER, "bigger_pictures larger_images"),
    (_PAGE, "playground"),
    (_RIGHTS, "copyright"),
    (_OVERFITTING, "overfitting overfit gets_worse worse_later"),
    (_DROPOUT, "dropout"),
    # Of people who begin.
    (_SLOW, "slow slower speed speed_up fast faster performance takes_long takes_so_long takes_too_long takes_forever"),
    (_FLAT_LOSS, "loss_goes_up loss_rises loss_increases going_down go_down stuck plateau loss_up loss_too_high"),
    (_FLAT_LOSS, "high_loss"),
    (_POOR, "noise_only only_noise just_noise pure_noise static blurred blur fuzzy unsharp black white blank dark"),
    (_POOR, "bright tinted ugly wrong_colours colours_are_wrong distorted artifacts improve quality bad poor"),
    (_POOR, "nothing_recognisable not_working doesn't_work wrong sharper detail"),
    (_COLLAPSE, "all_the_same same_image look_the_same looks_the_same alike identical variety diversity"),
    (_RESUME, "continue continue_training crash crashed restart power_cut"),
    (_STOP, "stop pause interrupt interrupted cancel abort quit"),
    (_ONE_DEVICE, "gpu cpu use_cpu use_gpu no_gpu apple apple_silicon amd"),
    (_SAVING, "save saving save_model autosave"),
    (_INTERVALS, "how_often"),
    (_PLACES, "where output outputs results"),
    (_DRAW, "generate generation generate_images draw drawing create_images inference make_images new_images"),
    (_DRAW, "use_model"),
    (_SAMPLERS, "sampling_steps steps_for_sampling"),
    (_REPEAT, "reproducible reproducibility repeat same_result"),
    (_CLASSES, "classes class class_conditional categories"),
    (_COLUMNS, "conditional conditioning attributes metadata csv spreadsheet excel"),
    (_CAPTIONS, "text words txt2img text2image text_prompt describe_images"),
    (_PRETRAINED, "fine_tuning finetune finetuning stable_diffusion sdxl flux"),
    (_COPIES, "memorize memorise copy copied"),
    (_HELD_OUT, "validation validation_set train_test_split test_set hold_out split"),
    (_MIRRORED, "mirrored mirror_images mirroring left_right"),
    (_GREY, "greyscale black_and_white monochrome rgb"),
    (_BACKGROUND, "alpha alpha_channel rgba"),
    (_FORMATS, "png jpeg jpg webp tiff dicom nifti fits medical numpy npy npz hdf5 zarr format formats file_format"),
    (_FORMATS, "file_types"),
    (_SOURCE, "huggingface hugging_face input own_images"),
    (_VIDEO, "video gif animation animate movie"),
    (_DISK, "disk disk_space disk_full storage"),
    (_EXPORT, "export onnx diffusers safetensors deploy share_model"),
    (_RESTORE, "upscale super_resolution deblur colorize restore pix2pix masks segmentation"),
    (_VARY, "img2img image_to_image vary variations edit"),
    (_DURATION, "cost price how_many_steps number_of_images long_enough when_done time_left"),
    (_NETWORK, "network_size model_size bigger_network bigger_model layers parameters number_of_parameters"),
    (_NETWORK, "architecture"),
    (_TRANSFORMER, "transformer"),
    (_OPTIMIZERS, "adam sgd rmsprop lion"),
    (_COMPARE, "compare compare_runs comparison"),
    (_PROGRESS, "progress watch curve loss_curve graph plot chart monitor"),
    (_FEW_IMAGES, "few_images small_dataset enough_images small_set more_images"),
    (_PRESETS, "preset presets best_settings default_settings recipe"),
    (_HEIC, "phone"),
    (_SYSTEM, "install installation docker linux"),
    (_PYTHON, "python api notebook jupyter colab script"),
    (_CLUSTER, "cluster slurm cloud aws"),
    (_DEPTH, "16_bit 16_bits hdr"),
    (_NORM, "gradient gradients"),
    (_NOISE_LEVELS, "noise_level"),
    (_AUGMENTATION, "augmentation augmentations data_augmentation rotate rotation zoom"),
    (_START, "help start getting_started tutorial beginner diffusion how_does_it_work"),
)
ADVICE = {word: advice for advice, words in _WORDS for word in words.split()}
"""Words, in lower case and with "_" between them."""

# Other words for those in ADVICE, in the singular.
_SAME = {"picture": "image", "pic": "image", "photo": "image", "grad": "gradient", "gray": "grey", "color": "colour"}
_SAME |= {"grayscale": "greyscale", "colorful": "colourful", "model": "network"}
# Words that say least of what is meant, as in "NaN loss" or "data augmentation".
_VAGUE = ("loss", "data", "dataset", "gpu", "cpu", "where", "name", "words", "text", "class", "wrong", "bad", "start")


def advice_on(word: str) -> Advice | None:
    """Return the advice on a word as people write it, such as gradient-accumulation-steps; None without one."""
    return ADVICE.get(word.lstrip("-").lower().replace("-", "_").replace(" ", "_"))


def advice_within(phrase: str) -> Advice | None:
    """Return the advice on the longest known words in a phrase, such as "NaN loss" or "T=1000"; None without one."""
    plain = _plain_words()
    for words in parts_of(phrase):
        found = ADVICE.get("_".join(words)) or plain.get(tuple(map(_plain, words)))
        if found is not None:
            return found
    return None


def parts_of(phrase: str) -> list[list[str]]:
    """Return the words of a phrase that follow each other, longest first; of as many words, the last ones first."""
    words = re.findall(r"[a-z0-9/+']+", phrase.lower().replace("_", " "))[:12]
    parts = [words[i:j] for i in reversed(range(len(words))) for j in range(i + 1, len(words) + 1)]
    return sorted(parts, key=lambda part: (-len(part), len(part) == 1 and part[0] in _VAGUE))


@cache
def _plain_words() -> dict[tuple[str, ...], Advice]:
    known: dict[tuple[str, ...], Advice] = {}
    for word, advice in ADVICE.items():
        known.setdefault(tuple(map(_plain, word.split("_"))), advice)
    return known


def _plain(word: str) -> str:
    """Return a word in the singular, or the usual word for it: "image" for "pictures"."""
    one = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word
    return _SAME.get(one, one)
