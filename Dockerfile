# LMM-R1 on NVIDIA GPUs. From the top of the project:
#   docker build --tag lmm-r1 .
#   docker run --gpus all --ipc host --volume "$PWD/runs:/workspace/runs" lmm-r1 lmm-r1 train_ppo_ray --help
# vLLM 0.29 brings PyTorch 2.13 and its CUDA libraries; the compiler in the image is for DeepSpeed's operators and Triton.
ARG CUDA=13.0.2
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
# What is installed changes with these files alone, so that a change of the code installs nothing again.
COPY pyproject.toml setup.py README.md LICENSE ./
COPY compat compat
RUN mkdir lmm_r1 remote_rm && touch lmm_r1/__init__.py remote_rm/__init__.py \
    && python3 -m venv /opt/venv \
    # No GPU is there while an image is built.
    && LMM_R1_BACKEND=gpu compat/install.sh /opt/venv serve

COPY . .
ENV PATH=/opt/venv/bin:$PATH
CMD ["bash"]
