# moto's S3 server, the store of tests/cluster (k8s/overlays/test).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
RUN python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore "moto[s3,server]==5.2.5"
USER 10001
EXPOSE 8333
ENTRYPOINT ["moto_server", "-H", "0.0.0.0", "-p", "8333"]
