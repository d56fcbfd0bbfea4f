# A server for the models under /models:
#
#   docker build --tag inlay .
#   docker run --publish 8000:8000 --volume ./runs:/models:ro --volume ./hosts:/hosts:ro --env INLAY_SERVE_KEYS inlay /models --host /hosts/minilm
#
# The host may also come from the hub, where there is a network: leave out --host and HF_HUB_OFFLINE.
# --build-arg TORCH_INDEX=URL takes torch from an index of its own, such as that of its builds for CPUs, which are gigabytes smaller.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/inlay \
 && /opt/inlay/bin/pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url $TORCH_INDEX} torch \
 && /opt/inlay/bin/pip install --no-cache-dir --constraint constraints.txt '.[serve]'

FROM python:3.11-slim
COPY --from=build /opt/inlay /opt/inlay
RUN useradd --create-home --uid 10001 inlay
USER inlay
ENV PATH=/opt/inlay/bin:$PATH HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 INLAY_CACHE=/tmp/inlay
EXPOSE 8000
STOPSIGNAL SIGTERM
# Asked with one of the keys, where there are some; without any the answer 401 is a sign of life too.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-c", "import os, urllib.request as u, urllib.error as e\nr = u.Request('http://127.0.0.1:8000/health', headers={'X-API-Key': os.environ.get('INLAY_SERVE_KEYS', '').split(',')[0]})\ntry:\n    u.urlopen(r, timeout=4)\nexcept e.HTTPError as error:\n    raise SystemExit(error.code != 401)"]
ENTRYPOINT ["inlay", "serve", "--bind", "0.0.0.0:8000"]
