"""What can be set about a server."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from hpml.core.contract import Config

MOST_BATCH_ROWS = 4096
MOST_RECORDED_REQUESTS, MOST_RECORDED_BYTES = 100_000, 64_000_000  # in a file, and of one to be replayed


class ServerConfig(Config):
    """Where a server listens, and the bounds of what it accepts.

    max_batch_rows: of one run of the engine, which several requests may share, and of one request.
    max_queue_ms: a request that would wait longer is refused with 429; nothing is held back to fill a batch.
    """

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free one
    grpc_port: int | None = Field(default=None, ge=0, le=65535)  # None: HTTP only
    max_batch_rows: int = Field(default=64, ge=1, le=MOST_BATCH_ROWS)
    max_queue_ms: float = Field(default=100.0, gt=0)
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    max_pending_bytes: int = Field(
        default=256 << 20, ge=1024
    )  # of all bodies that are being read or answered
    max_header_bytes: int = Field(default=16 << 10, ge=1024)
    max_connections: int = Field(default=512, ge=1)
    receive_timeout_s: float = Field(
        default=30.0, gt=0
    )  # for a request to arrive whole, and an answer to leave
    idle_timeout_s: float = Field(default=75.0, gt=0)  # of a connection between requests
    drain_s: float = Field(
        default=0.0, ge=0
    )  # of being not ready before it stops to listen, for load balancers
    stop_s: float = Field(default=30.0, gt=0)  # for requests in flight, after that
    token_file: Path | None = (
        None  # every request but health checks has to bring its content as a bearer token
    )
    log_file: Path | None = None  # of what the server says, in place of the standard streams
    page: bool = False  # to try the model with, at /
    record: Path | None = None  # requests, for another version to be tried with
    record_requests: int = Field(default=1000, ge=1, le=MOST_RECORDED_REQUESTS)
    record_bytes: int = Field(default=MOST_RECORDED_BYTES, ge=1024, le=MOST_RECORDED_BYTES)
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @model_validator(mode="after")
    def _tls_needs_both(self) -> ServerConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both tls_certificate and tls_key")
        return self

    @model_validator(mode="after")
    def _bounds_of_a_recording_need_one(self) -> ServerConfig:
        if self.record is None and self.model_fields_set & {"record_requests", "record_bytes"}:
            raise ValueError("record_requests and record_bytes (--record-mb) need a file to record")
        return self
