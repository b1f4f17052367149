# A member of the household in a container: docs/user/platforms/docker.md says how to run it, and why
# with the host's network. Torch is its CPU build: a tenth of what the one with CUDA takes.
FROM python:3.13-slim AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY p2ptrain ./p2ptrain
RUN uv venv /opt/p2ptrain \
    && uv pip install --no-cache --python /opt/p2ptrain/bin/python --torch-backend cpu -c constraints.txt .

FROM python:3.13-slim
COPY --from=build /opt/p2ptrain /opt/p2ptrain
RUN useradd --create-home --uid 1000 p2ptrain \
    && install --directory --owner p2ptrain --group p2ptrain --mode 700 /state
ENV PATH=/opt/p2ptrain/bin:$PATH P2PTRAIN_STATE_DIR=/state
USER 1000:1000
# the device's key and pairings: a member without it is a stranger at every start
VOLUME /state
# SIGTERM: join hands its work over, so stop with a time limit of 90 s
STOPSIGNAL SIGTERM
ENTRYPOINT ["p2ptrain"]
CMD ["join"]
