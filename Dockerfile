# The server on CPUs (docs/guides/docker.md). The models are not in the image: mount their folder at /models.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN python3 -m venv /opt/adafuse
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PATH=/opt/adafuse/bin:$PATH
COPY constraints.txt /src/
# The index of PyTorch's builds without CUDA. torch has a layer of its own, because it changes rarely.
# Its headers and tests, a fifth of its size, are used only to compile.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --quiet --constraint /src/constraints.txt --extra-index-url ${TORCH_INDEX} torch numpy \
    && rm -r /opt/adafuse/lib/python3*/site-packages/torch/include /opt/adafuse/lib/python3*/site-packages/torch/test
COPY pyproject.toml README.md LICENSE /src/
COPY adafuse_llm /src/adafuse_llm
RUN pip install --quiet --constraint /src/constraints.txt "/src[cli,gguf,grammar,serve]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/adafuse /opt/adafuse
# A new volume takes its owner from the folder of the image.
RUN useradd --create-home --uid 1000 adafuse \
    && install --directory --owner=adafuse --group=adafuse /home/adafuse/.cache
USER adafuse
WORKDIR /models
VOLUME /models
ENV PATH=/opt/adafuse/bin:$PATH
EXPOSE 8000
# Unhealthy until the members are loaded.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
ENTRYPOINT ["adafuse", "serve", "--host", "0.0.0.0"]
