"""The commands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fullgraph._version import __version__
from fullgraph.cli.output import console, refusals, writable, write_json
from fullgraph.recipes import BY_NAME

app = typer.Typer(
    name="fullgraph",
    help="Low-precision training that compiles: one node forward, one node backward for every layer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

_RECIPES = ", ".join(BY_NAME)

RecipeName = Annotated[
    str, typer.Option("--recipe", help=f"One of {_RECIPES}.", show_default=False)
]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1 ...")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result here.")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """What all commands share."""
    if version:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.command()
def train(
    recipe: RecipeName,
    compare: Annotated[
        str | None, typer.Option(help="Train a second model beside it, in this recipe.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Text: a file, or a directory of files. Default: Python's standard library.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    device: Device = "cpu",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where loss.jsonl and loss.png go.")
    ] = Path("runs/train"),
    json: Json = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the batches.")] = 0,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where checkpoints go; by default none.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints; the last is saved too.")
    ] = 50,
    stop_after: Annotated[
        int | None, typer.Option(metavar="N", help="End after this step, to be resumed later.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from this checkpoint.")
    ] = None,
    statistics_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="Sample what casts do to values in one step of N."),
    ] = None,
    size: Annotated[
        str, typer.Option(help="Of the model: small, or 100m for 100 million parameters.")
    ] = "small",
) -> None:
    """Train a small byte-level GPT on real text, compiled with fullgraph=True."""
    from fullgraph.cli.train import TrainOptions, size_of, summary, train

    with refusals():
        if json is not None:
            writable(json)
        result = train(
            TrainOptions(
                recipe,
                compare,
                data,
                steps,
                device,
                out,
                seed,
                save,
                save_every,
                stop_after,
                resume,
                statistics_every,
                size_of(size),
            )
        )
    write_json(json, result)
    console.print(summary(result))
    console.print(
        f"curves: {result['curve']}\nlog: {result['log']}", highlight=False, soft_wrap=True
    )
    if result["statistics"] is not None:
        console.print(f"statistics: {result['statistics']}", highlight=False, soft_wrap=True)
    if result["interrupted"]:
        console.print(f"interrupted after {result['steps']} of {result['requested_steps']} steps")
        raise typer.Exit(INTERRUPTED)
    if result["steps"] < result["requested_steps"]:
        console.print(f"stopped after {result['steps']} of {result['requested_steps']} steps")


@app.command()
def explain(
    recipe: RecipeName,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Say what a small GPT compiles to: nodes, casts, GEMM routes, padding, recompiles."""
    from fullgraph.cli.explain import explain_gpt

    with refusals():
        if json is not None:
            writable(json)
        report = explain_gpt(recipe, device)
    write_json(json, report.to_dict())
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(json: Json = None) -> None:
    """Say what this machine can do, and what is missing. Exits with 1 if something blocks."""
    from fullgraph.cli.doctor import examine, tables

    with refusals():
        if json is not None:
            writable(json)
    findings = examine()
    write_json(json, findings)
    for table in tables(findings):
        console.print(table)
    for problem in findings["problems"]:
        console.print(f"\n{problem['what']}\nDo: {problem['do']}", highlight=False, markup=False)
    if any(problem["blocks"] for problem in findings["problems"]):
        raise typer.Exit(1)
