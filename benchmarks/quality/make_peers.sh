#!/bin/sh
# Make an environment of the peers' own, outside the project: sh benchmarks/quality/make_peers.sh FOLDER
#
# torch 2.13 on a CPU has no torchvision, which denoising-diffusion-pytorch imports. So that package is installed without
# its requirements, and FOLDER alone gets a package named torchvision with the few names that it imports: see
# peers/torchvision_stub.py. Nothing of the peers' code is changed.
set -eu
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet --constraint "$here/peers/constraints.txt" \
    torch numpy pillow einops tqdm ema-pytorch accelerate scipy diffusers safetensors
"$folder/bin/pip" install --quiet --no-deps denoising-diffusion-pytorch==2.3.4
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/torchvision"
cp "$here/peers/torchvision_stub.py" "$site/torchvision/__init__.py"
"$folder/bin/python" -c 'import denoising_diffusion_pytorch, diffusers, torch; print("peers are ready: torch", torch.__version__)'
