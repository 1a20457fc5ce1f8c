"""`hpml serve`: put a model behind an address."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hpml.pipelines.commands.options import HOME, Home, app

_Source = Annotated[
    str,
    typer.Argument(
        metavar="[BUNDLE]",
        help="The folder of a bundle; a run's id; a registered model as NAME@champion or NAME/VERSION.",
    ),
]


@app.command()
def serve(
    source: _Source = "latest",
    home: Home = HOME,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one, which is printed.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Also serve gRPC there.", show_default="not served")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=0, max=1024, help="Of the engine; 0: those it was measured with.")
    ] = 0,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Rows of a request, and of a batch.")] = 64,
    max_queue_ms: Annotated[float, typer.Option(min=1, help="Who would wait longer gets 429.")] = 100.0,
    max_body_mb: Annotated[float, typer.Option(min=0.01, help="Of a request, in 10^6 bytes.")] = 16.0,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests have to bring its content as bearer token.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM, with --tls-key.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM.")] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="On SIGTERM: not ready for so long, then stop.")
    ] = 0.0,
    log_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="All that it says goes there; 10 MB and as much in FILE.1."),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Also serve a page to try the model with, at /.")
    ] = False,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep requests there, for hpml deploy --replay.")
    ] = None,
    record_requests: Annotated[int | None, typer.Option(help="As many at most.", show_default="1000")] = None,
    record_mb: Annotated[float | None, typer.Option(help="Of all, in 10^6 bytes.", show_default="64")] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run processing.py of the bundle: a user's own task.")
    ] = False,
) -> None:
    """Serve a model over HTTP by the Open Inference Protocol, until Ctrl-C. SIGHUP opens it anew."""
    import signal

    from hpml.core.contract import validate_options
    from hpml.core.errors import UsageError
    from hpml.pipelines.delivery.served_source import served_source

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens to it
    open_model = served_source(source, home, threads=threads, run_code=run_code)
    try:
        from hpml.serving.config import ServerConfig
        from hpml.serving.run import serve as serve_until_stopped
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing", fix="pip install 'hpml-pipeline[serving]'") from None
    given = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "max_batch_rows": max_batch,
        "max_queue_ms": max_queue_ms,
        "max_body_bytes": _bytes(max_body_mb, "--max-body-mb"),
        "token_file": token_file,
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "drain_s": drain_s,
        "log_file": log_file,
        "page": page,
        "record": record,
    }
    given |= {} if record_requests is None else {"record_requests": record_requests}
    given |= {} if record_mb is None else {"record_bytes": _bytes(record_mb, "--record-mb")}
    config: ServerConfig = validate_options(ServerConfig, given, where="the options of hpml serve")
    serve_until_stopped(open_model, config, partial(typer.echo, err=True))


def _bytes(megabytes: float, option: str) -> int:
    from hpml.core.errors import UsageError

    if not math.isfinite(megabytes):
        raise UsageError(f"{option} is {megabytes}", fix="give a number of 10^6 bytes")
    return round(megabytes * 1e6)
