# The image of dfe-archiver. docs/deployment.md says how to build and run it.
#
#   docker build -t dfe-archiver .
#
# Where packages come from is not said here: pass your own pip configuration, and the certificate of a proxy
# or mirror that it names, as secrets: --secret id=pip.conf,src=... --secret id=ca.pem,src=...
# The tags below move: a repaired base is taken up by the next build. For a build that can be repeated, give both
# images with their digests, --build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:...; the label base.name keeps it.

ARG BUILD_IMAGE=python:3.11-bookworm
ARG BASE_IMAGE=python:3.11-slim-bookworm

# --- build: installs what the hashes allow, and makes it small -----------------------------------

FROM ${BUILD_IMAGE} AS build

WORKDIR /src
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_NO_INPUT=1 \
    PIP_ROOT_USER_ACTION=ignore

# The second environment goes into the image and has no pip; the first one installs into it.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/dfe-archiver

COPY deploy/requirements/core.txt deploy/requirements/dev.txt deploy/requirements/
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    awk '/^setuptools==/ {on=1} on {print} !/\\$/ {on=0}' deploy/requirements/dev.txt > setuptools.txt \
    && /opt/pip/bin/pip install --quiet --require-hashes --no-deps --only-binary :all: -r setuptools.txt \
    && /opt/pip/bin/pip --python /opt/dfe-archiver/bin/python install --quiet --no-compile \
        --require-hashes --no-deps --only-binary :all: -r deploy/requirements/core.txt

COPY pyproject.toml README.md LICENSE ./
COPY archiver/ archiver/
RUN /opt/pip/bin/pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir wheels . \
    && /opt/pip/bin/pip --python /opt/dfe-archiver/bin/python install --quiet --no-compile \
        --no-deps --no-index wheels/*.whl

# Symbols, the SDK's descriptions of services that are not S3 or a way to log in to it, packages' own tests, type
# stubs, SDKs' asynchronous twins, and what would colour a help text.
# Modules are compiled, since a start without that takes a second longer; their sources do not change.
RUN find /opt/dfe-archiver -name '*.so*' -type f -exec strip --strip-unneeded {} + \
    && find /opt/dfe-archiver -path '*/boto*/data/*' -prune -type d \
        ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r {} + \
    && find /opt/dfe-archiver -name tests -type d -prune -exec rm -r {} + \
    && find /opt/dfe-archiver -path '*/azure/*/aio' -type d -prune -exec rm -r {} + \
    && find /opt/dfe-archiver -name '*.pyi' -delete \
    && /opt/pip/bin/pip --python /opt/dfe-archiver/bin/python uninstall --quiet --yes \
        rich pygments markdown-it-py mdurl \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/dfe-archiver/lib

# --- base: what the image stands on, without what it does not use ---------------------------------

FROM ${BASE_IMAGE} AS base

COPY deploy/image/slim-base.sh /tmp/slim-base.sh
RUN sh /tmp/slim-base.sh && rm /tmp/slim-base.sh \
    && echo 'archiver:x:10001:10001::/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'archiver:x:10001:' >> /etc/group \
    && install -d -o 10001 -g 10001 -m 0770 /var/spool/dfe-archiver

# --- the image ------------------------------------------------------------------------------------

# From scratch, as what a later layer takes away stays in the ones below it.
FROM scratch

ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="dfe-archiver" \
      org.opencontainers.image.description="Archives Kafka topics or gRPC pushes into compressed files that standard tools read" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.documentation="docs/deployment.md"

# hadolint ignore=DL3067
COPY --from=base / /
COPY --from=build /opt/dfe-archiver /opt/dfe-archiver
COPY deploy/image/healthcheck.py deploy/image/complete.py /opt/dfe-archiver/

ENV PATH=/opt/dfe-archiver/bin:/usr/local/bin:/usr/bin:/bin \
    LANG=C.UTF-8 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# Whatever is missing ends the build here.
RUN ["/opt/dfe-archiver/bin/python", "/opt/dfe-archiver/complete.py"]

# The only folder it writes to; where it archives to a folder, that one as well.
VOLUME /var/spool/dfe-archiver
WORKDIR /
USER 10001:10001

# metrics and health; gRPC pushes
EXPOSE 9090 50051

STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
    CMD ["/opt/dfe-archiver/bin/python", "/opt/dfe-archiver/healthcheck.py"]
ENTRYPOINT ["/opt/dfe-archiver/bin/dfe-archiver"]
CMD ["run"]
