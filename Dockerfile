# NVIDIA's PyTorch with this project in it:
#
#   docker build -t vocab-parallel .
#   docker run --rm -it --gpus all --ipc host --ulimit memlock=-1 vocab-parallel
#
# The second trains as the first command of the README does; any other command may follow, such as
# "python tools/gpu_report.py" or "bash examples/eight_h100.sh --dry-run".
FROM nvcr.io/nvidia/pytorch:25.08-py3

WORKDIR /workspace/vocab-parallel
COPY . .

# The environment sees the image's packages. PyTorch, NCCL, Triton and NumPy stay the image's own,
# which are built for each other. So does pip: the image may lack what puts one into an environment.
# The image's constraints hold for its own packages; what is added here is seen by nothing else. The
# second line is for the contract tests of tools/gpu_report.py.
RUN python -m venv --system-site-packages --without-pip .venv \
 && PIP_CONSTRAINT= pip --python .venv/bin/python install --no-cache-dir blake3 pybind11 sentencepiece rich \
 && PIP_CONSTRAINT= pip --python .venv/bin/python install --no-cache-dir 'pytest>=8.2' hypothesis \
 && pip --python .venv/bin/python install --no-cache-dir --no-build-isolation --no-deps -e .

# The image's torchrun would start its ranks with the image's Python, which sees none of that.
RUN printf '#!/bin/sh\nexec /workspace/vocab-parallel/.venv/bin/python -m torch.distributed.run "$@"\n' \
      >.venv/bin/torchrun \
 && chmod +x .venv/bin/torchrun

# As "source .venv/bin/activate" does; the scripts take this environment as it is.
ENV VENV=/workspace/vocab-parallel/.venv \
    PATH=/workspace/vocab-parallel/.venv/bin:$PATH \
    VOCAB_PARALLEL=1 VOCAB_SIZE=256k

CMD ["bash", "pretrain_gpt.sh"]
