# For NVIDIA GPUs; it runs on a CPU too:
#     docker build -t longctx .
#     docker run --gpus all --shm-size=1g -v "$PWD/runs:/longctx/runs" longctx train attention=flash seq_len=16384
# For a CPU alone, a fifth of the size:
#     docker build -t longctx --build-arg INDEX=https://download.pytorch.org/whl/cpu .
# torch's wheels bring CUDA's libraries and Triton its assembler, so no image of NVIDIA's is needed: the host has
# the driver and the NVIDIA Container Toolkit. Triton and torch.compile call the C compiler at run time.
FROM python:3.12-slim
RUN apt-get update && apt-get install -y --no-install-recommends make g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /longctx
ARG INDEX=""
ENV PIP_EXTRA_INDEX_URL=$INDEX PIP_NO_CACHE_DIR=1
COPY Makefile pyproject.toml constraints.txt README.md LICENSE train.py eval.py ./
COPY configs configs
COPY longctx longctx
RUN make .venv/installed
ENV PATH=/longctx/.venv/bin:$PATH
ENTRYPOINT ["longctx"]
CMD ["--help"]
