# One image for scheduler, worker and gateway; docs/containers.md says how it is used.
#
#   docker build -t slotwise:cpu .
#   docker build -t slotwise:gpu --build-arg SLOTWISE_CUDA=ON --build-arg BASE_IMAGE=ubuntu:24.04 \
#     --build-arg BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04 .
#
# BASE_IMAGE is Debian 12 or newer, Ubuntu 24.04 or newer, or alike. BUILD_IMAGE, where it is
# another one, has the same Python; with SLOTWISE_CUDA=ON it has nvcc. Nothing of it is in the result.
ARG BASE_IMAGE=debian:bookworm-slim
ARG BUILD_IMAGE=${BASE_IMAGE}

FROM ${BASE_IMAGE} AS python
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      libstdc++6 python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/slotwise

# Of these two files what builds and runs: tools of developers change, and make nothing here anew.
FROM python AS needed
COPY pyproject.toml constraints-dev.txt /
RUN mkdir /needed && python3 -c "import re, tomllib; \
      text = open('/pyproject.toml').read(); \
      told = tomllib.loads(text); \
      needed = told['project']['dependencies']; \
      name = lambda line: re.match(r'[\w.-]*', line)[0]; \
      held = [line for line in open('/constraints-dev.txt').read().splitlines() \
        if name(line) in set(map(name, needed))]; \
      parts = re.split(r'(?m)^(?=\[)', text); \
      kept = ('[build-system]', '[project]', '[project.scripts]', '[tool.scikit-build'); \
      write = lambda name, *lines: print(*lines, sep='\n', file=open('/needed/' + name, 'w')); \
      write('pyproject.toml', *[part for part in parts if part.startswith(kept)]); \
      write('constraints', *filter(None, held)); \
      write('to-run', *needed); \
      write('to-build', *told['build-system']['requires'], 'cmake>=3.26', 'ninja'); \
      write('folders', *told['tool']['scikit-build']['wheel']['packages'])"

# Python and what the project needs of others.
FROM python AS runtime
# Empty: pip as it is set up in BASE_IMAGE. An index with torch for CPUs keeps CUDA out.
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PATH=/opt/slotwise/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /data
COPY --from=needed /needed/constraints /tmp/
# Without what only C++ is built and tested with.
RUN pip install -q -c /tmp/constraints torch \
    && cd /opt/slotwise/lib/python3*/site-packages/torch \
    && rm -rf include test bin/test_* bin/*Test bin/protoc*
COPY --from=needed /needed/to-run /tmp/
RUN pip install -q -c /tmp/constraints -r /tmp/to-run

# The project: its native library before its Python sources, which change more often.
FROM ${BUILD_IMAGE} AS project
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/slotwise
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
ENV PATH=/opt/slotwise/bin:/usr/local/cuda/bin:${PATH} \
    PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /source
COPY --from=needed /needed/to-build /tmp/
RUN pip install -q -r /tmp/to-build
ARG SLOTWISE_CUDA=OFF
# Empty: all that the project knows. 90a-real: H100 and H200 alone, in less time.
ARG SLOTWISE_CUDA_ARCHITECTURES=
COPY --from=needed /needed ./
COPY README.md LICENSE ./
COPY protos protos
COPY native native
RUN if [ -z "${SLOTWISE_CUDA_ARCHITECTURES}" ]; then unset SLOTWISE_CUDA_ARCHITECTURES; fi \
    && mkdir -p $(cat folders) \
    && pip wheel -q --no-deps --no-build-isolation --config-settings build-dir=/native-build \
      -w /tmp/without-python .
COPY scheduler_service scheduler_service
COPY worker worker
COPY clients clients
RUN if [ -z "${SLOTWISE_CUDA_ARCHITECTURES}" ]; then unset SLOTWISE_CUDA_ARCHITECTURES; fi \
    && pip wheel -q --no-deps --no-build-isolation --config-settings build-dir=/native-build \
      -w /tmp/wheel . \
    && pip install -q --no-deps --no-index --root /installed /tmp/wheel/*.whl

FROM runtime
LABEL org.opencontainers.image.title="Slotwise" \
      org.opencontainers.image.description="Serves a language model over gRPC and HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"
# A fresh volume takes the owner of the folder that it is mounted on.
RUN groupadd --gid 10001 slotwise \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp slotwise \
    && install -d -o slotwise -g slotwise /data /data/models /data/secrets \
    && install -d -o slotwise -g slotwise -m 700 /data/journal
COPY --from=project /installed/opt/slotwise /opt/slotwise
ENV PYTHONUNBUFFERED=1 SLOTWISE_CACHE=/data
USER 10001:10001
EXPOSE 50051 8000
CMD ["slotwise", "--help"]
