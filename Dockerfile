# hypjax with JAX for CUDA 12, whose libraries are among the Python packages; the host needs a driver
# of version 525 or newer, and the NVIDIA Container Toolkit:
#
#   docker build --build-arg VERSION=0.1.0 --tag hypjax .
#   docker run --rm --gpus=all --user="$(id -u):$(id -g)" --volume="$PWD:/work" hypjax train \
#     --config=configs/glyphs.py
FROM python:3.12-slim-bookworm AS wheel
# The version, which Git would give outside a container.
ARG VERSION=0.1.0.dev0
COPY . /source
RUN SETUPTOOLS_SCM_PRETEND_VERSION="$VERSION" pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels /source

FROM python:3.12-slim-bookworm
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3013
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda12,lite,serve]" \
    && mkdir --mode=777 /home/user /work
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Caches and prepared datasets, of whichever user the container runs as.
ENV HOME=/home/user
USER 65534
WORKDIR /work
ENTRYPOINT ["hypjax"]
CMD ["--help"]
