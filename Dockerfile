# Unfog on processors: `docker build -t unfog --build-arg TORCH_INDEX=ADDRESS .`, then
# `docker run --rm --user "$(id -u):$(id -g)" -e HOME=/work -e UNFOG_CACHE=/work/.unfog-cache -v "$PWD:/work" unfog train
# photos --budget 1h`. Runs are written to ./runs, as yours, and decoded images stay in ./.unfog-cache.
FROM python:3.12-slim-bookworm

WORKDIR /src
COPY constraints.txt pyproject.toml hatch_build.py README.md LICENSE ./
# Address of the index of CPU builds, which pytorch.org gives under "Get started"; else 3 GB of CUDA packages come along.
ARG TORCH_INDEX=
# torch alone first, so that a change of the sources does not fetch it again.
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
COPY src src
COPY docs docs
# Parts beyond training, such as `all`; these read s3:// and https:// images.
ARG EXTRAS=s3,http
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt ".${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid 10001 unfog

USER 10001
WORKDIR /work
ENTRYPOINT ["unfog"]
CMD ["--help"]
