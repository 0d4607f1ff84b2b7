# The image of tollgate: one program on a base without a shell. docs/production.md tells
# how to run it.
#
#   docker build -t tollgate .
#
# BUILD has the Rust of rust-toolchain.toml and gcc, on the Debian of BASE. If NVRTC is in
# it, the image gets compiled kernels for GPUs. BASE has the C library and libgcc.
ARG BUILD=docker.io/library/rust:1.95-bookworm
ARG BASE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD} AS build
WORKDIR /src
COPY . .
# Paths of the build do not belong into the program: two builds give the same bytes.
ENV CARGO_HOME=/cargo RUSTFLAGS="--remap-path-prefix=/src= --remap-path-prefix=/cargo="
RUN --mount=type=cache,target=/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --locked --profile dist --package tollgate && \
    mkdir -p -m 0700 /out/state/tollgate && \
    mkdir -p /out/bin && \
    cp target/dist/tollgate /out/bin/tollgate
RUN /out/bin/tollgate worker kernels build --out /out/bin/kernels || \
    { rm -rf /out/bin/kernels; echo "the image has no compiled kernels for GPUs"; }

FROM ${BASE} AS tollgate
LABEL org.opencontainers.image.title="tollgate" \
      org.opencontainers.image.description="A multi-tenant inference gateway that limits, batches and bills by GPU time" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /out/bin/ /usr/local/bin/
COPY --from=build /src/LICENSE /usr/share/doc/tollgate/LICENSE
# A new volume at this path belongs to the user of the image.
COPY --from=build --chown=65532:65532 /out/state/ /var/lib/
# NVIDIA's container toolkit adds the driver. Which GPUs are visible is said when the
# container is started.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
EXPOSE 8443 9443
HEALTHCHECK --interval=10s --timeout=6s --start-period=30m \
    CMD ["/usr/local/bin/tollgate", "health", "--data", "/var/lib/tollgate"]
ENTRYPOINT ["/usr/local/bin/tollgate"]
CMD ["up", "--config", "/etc/tollgate", "--data", "/var/lib/tollgate"]
