"""`hpml deploy`, `rollback` and `undeploy`: a model is served elsewhere than in this terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hpml.pipelines.commands.options import HOME, Home, app

_PLACES = "local|kubernetes"
_Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the deployment.")]
_Namespace = Annotated[str | None, typer.Option(help="Of the cluster.", show_default="hpml")]
_WaitS = Annotated[float | None, typer.Option(min=0, help="For another rollout to end.", show_default="60")]
_ReadyS = Annotated[float | None, typer.Option(min=1, help="For servers to get ready.", show_default="300")]


@app.command()
def deploy(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The folder of a bundle; a run's id; a registered model as NAME@champion or NAME/VERSION.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="local|kubernetes|compose|triton|vllm|kserve", help="What will run it."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write files there rather than roll out."),
    ] = None,
    home: Home = HOME,
    name: Annotated[str | None, typer.Option(help="Of the deployment; by default the model's.")] = None,
    image: Annotated[str | None, typer.Option(help="Of the server.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="The address it is reached at on this machine.", show_default="127.0.0.1"),
    ] = None,
    port: Annotated[int | None, typer.Option(show_default="8000")] = None,
    cpus: Annotated[
        float | None, typer.Option(help="It may use.", show_default="the engine's measured threads")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="512Mi|2Gi", help="It may use.", show_default="by the size of the bundle"),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Of the server; of the engine in Triton.", show_default="1")
    ] = None,
    max_batch: Annotated[int | None, typer.Option(help="Rows of a batch.", show_default="64")] = None,
    max_queue_ms: Annotated[
        float | None, typer.Option(help="Who would wait longer is refused.", show_default="100")
    ] = None,
    drain_s: Annotated[float | None, typer.Option(help="Not ready for so long before it stops.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests have to bring its content as bearer token.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="Of the cluster.", show_default="hpml; of KServe's default")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option(help="Of the cluster, with the rights to read the bundle.")
    ] = None,
    bundle_uri: Annotated[
        str | None,
        typer.Option(metavar="s3://BUCKET/FOLDER|pvc://CLAIM/FOLDER", help="Where the cluster finds it."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="s3://BUCKET", help="It is uploaded there without --bundle-uri.", show_default="s3://hpml"
        ),
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=0, help="As many as the load needs.", show_default="--replicas")
    ] = None,
    cpu_limit: Annotated[
        float | None, typer.Option(help="More than what a pod has to itself.", show_default="--cpus")
    ] = None,
    token_secret: Annotated[
        str | None, typer.Option(help="A Secret of the cluster whose key token requests have to bring.")
    ] = None,
    ingress_host: Annotated[str | None, typer.Option(help="Reach it from outside by this name.")] = None,
    ingress_class: Annotated[str | None, typer.Option(help="Of the Ingress.")] = None,
    ingress_tls_secret: Annotated[
        str | None, typer.Option(help="A Secret with its certificate and key: HTTPS.")
    ] = None,
    ingress_annotation: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Of the Ingress; may be repeated."),
    ] = None,
    store_cidr: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Pods reach the store there only; may be repeated.",
            show_default="everywhere",
        ),
    ] = None,
    store_port: Annotated[int | None, typer.Option(help="With --store-cidr.", show_default="443")] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="NAMESPACE/NAME", help="Of the Gateway API, in place of an Ingress."),
    ] = None,
    smoke_s: Annotated[
        float | None, typer.Option(min=1, help="A canary is asked for so long.", show_default="10")
    ] = None,
    p50_factor: Annotated[
        float | None,
        typer.Option(min=1, help="Its p50 may be so many times the stable one's.", show_default="1.25"),
    ] = None,
    p99_factor: Annotated[
        float | None, typer.Option(min=1, help="Its p99, likewise.", show_default="2")
    ] = None,
    benchmark_factor: Annotated[
        float | None,
        typer.Option(min=1, help="A run of its engine, against the benchmark's p50.", show_default="2"),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also send it these requests, of hpml serve --record."),
    ] = None,
    replay_agreement: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Least share of the same answers to them.", show_default="any"),
    ] = None,
    wait_s: _WaitS = None,
    ready_s: _ReadyS = None,
    mode: Annotated[
        str | None, typer.Option(metavar="standard|knative", help="KServe's.", show_default="standard")
    ] = None,
    canary_percent: Annotated[
        int | None,
        typer.Option(help="Of the requests, beside the version that is there."),
    ] = None,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run processing.py of the bundle: a user's own task.")
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="It is for another machine: this one need not suit the engine."),
    ] = False,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="Build it for this machine, if it is bound to other hardware."),
    ] = False,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Also an engine whose goals were not all checked.")
    ] = False,
) -> None:
    """Roll a model out beside the one that is served, or write the files that bring it up.

    A first version is served once it has passed; a later one begins as canary, and takes over if it agrees
    with its golden samples, fails no request, and is as fast as its limits say. If not, nothing changes:
    exit 5.
    """
    from hpml.pipelines.delivery import deploy as delivery

    commands = delivery.deploy(source, to, _given(context), output, home=home, say=_say)
    if output is not None:
        _say(f"wrote {output}; bring it up with")
        print("\n".join(commands))


@app.command()
def rollback(
    context: typer.Context,
    name: _Name,
    to: Annotated[str, typer.Option("--to", metavar=_PLACES, help="Where it is served.")],
    home: Home = HOME,
    namespace: _Namespace = None,
    wait_s: _WaitS = None,
    ready_s: _ReadyS = None,
) -> None:
    """Serve again what was served before."""
    from hpml.pipelines.delivery import deploy as delivery

    delivery.rollback(name, to, _given(context), home=home, say=_say)


@app.command()
def undeploy(
    context: typer.Context,
    name: _Name,
    to: Annotated[str, typer.Option("--to", metavar=_PLACES, help="Where it is served.")],
    home: Home = HOME,
    namespace: _Namespace = None,
    wait_s: _WaitS = None,
) -> None:
    """Stop serving a model, and remove what was made for it. Its run, or its bundle in the store, stays."""
    from hpml.pipelines.delivery import deploy as delivery

    delivery.undeploy(name, to, _given(context), home=home, say=_say)


def _given(context: typer.Context) -> dict[str, Any]:
    """What somebody said of the fields of DeployOptions."""
    from hpml.pipelines.delivery.deploy_options import DeployOptions

    said = {name: context.params.get(name) for name in DeployOptions.model_fields}
    return {name: value for name, value in said.items() if value not in (None, [], ()) and value is not False}


def _say(line: str) -> None:
    from hpml.pipelines.terminal.console import err

    err.print(line, markup=False, soft_wrap=True)
