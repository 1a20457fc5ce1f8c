"""`hpml chat`: talk to a network."""

from __future__ import annotations

from typing import Annotated

import typer

from hpml.pipelines.commands.options import HOME, Home, app


@app.command()
def chat(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="[ENGINE]",
            help="A run's id, for the engine that it chose; RUN:VARIANT such as latest:int8/onnx; "
            "the folder of an engine or of a bundle.",
        ),
    ] = "latest",
    home: Home = HOME,
    beam: Annotated[int, typer.Option(min=1, max=64, help="Answers followed at once; 1: greedy.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, max=4096, help="Where an answer is cut.")] = 64,
) -> None:
    """Talk to a network of texts: a line in, its answer out, at the terminal or through a pipe."""
    from hpml.pipelines.terminal import chat as conversation

    conversation.talk(conversation.partner(engine, home), beams=beam, max_tokens=max_tokens)
