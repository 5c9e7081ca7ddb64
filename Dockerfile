# Copyright (c) 2026 The megatron_hdp authors. SPDX-License-Identifier: Apache-2.0
# megatron_hdp on NVIDIA's PyTorch image; docs/docker.md says how to build and start it.
# Not built here: the place where this was written has neither a Docker daemon nor NVIDIA's registry.
# What can be checked without them is (tests/scripts/test_docker.py).

# Transformer Engine, flash-attn and apex are in it, compiled against its torch. 26.07's is
# 2.13.0a0, of the release that our tests run on; 26.08 has a 2.14.
FROM nvcr.io/nvidia/pytorch:26.07-py3

# A pipe fails when any of its commands does.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# NVIDIA's list of constraints would bind the build environments of other packages too; below, what
# is installed binds instead.
ENV PIP_CONSTRAINT=""

# Root is not needed to train. The folder is the user's, since tests and quickstart write out/ in
# it; the number is not 1000, which Ubuntu's images give to a user of theirs.
RUN useradd --create-home --no-log-init --uid 10001 hdp \
    && install --directory --owner=hdp --group=hdp /opt/megatron_hdp

# Relative paths of our docs hold here.
WORKDIR /opt/megatron_hdp

# First only what decides about dependencies, so that a change of code does not install them anew.
COPY --chown=hdp:hdp pyproject.toml requirements.txt requirements-dev.txt ./
COPY --chown=hdp:hdp tools/image_pins.py tools/

# megatron-core and what else the image lacks, pinned; what it has stays as it is, torch first of
# all: our pin of it would replace NVIDIA's build and break what was compiled against that.
RUN python -m pip list --format=freeze >/tmp/image.txt \
    && python tools/image_pins.py /tmp/image.txt requirements-dev.txt >/tmp/pins.txt \
    && python -m pip install --no-cache-dir -c /tmp/image.txt -r /tmp/pins.txt \
    && rm /tmp/image.txt /tmp/pins.txt

# Scripts, docs and tests too: the image can be tested where it will run.
COPY --chown=hdp:hdp . .

# In place, as scripts/test.sh does it; the dependencies are there already.
RUN python -m pip install --no-cache-dir --no-deps -e .

# Everything from here on, and in the container, without root.
USER 10001

# Without a command it says what of this machine and image fits. NVIDIA's entry point stays.
CMD ["python", "-m", "megatron_hdp", "doctor"]
