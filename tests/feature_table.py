"""Write docs/features.md: every feature with every recipe, run anew. `./dev features`; exit status 1 if any fails."""

import argparse
import re
import sys
import traceback
from pathlib import Path

import torch

from feature_cases import FEATURES, MODES, RECIPES, FeatureCase, check
from fullgraph.tables import table

PAGE = Path(__file__).parents[1] / "docs" / "features.md"

HEAD = """# Features and recipes

Every feature of training with every recipe. "yes" says that all of this holds, and is tested:

- `torch.compile(fullgraph=True)` makes one graph of it; two with `is_first_microbatch`, for the first microbatch and
  for the others. From the third step on nothing is compiled.
- Outputs, gradients, weights and scales of four steps are those of eager mode, bit for bit; in Inductor too, with
  `emulate_precision_casts` for the operations between the layers.
- A layer is one node forward and one backward, and no GEMM is computed that nobody needs.
- On a GPU the same under `mode="reduce-overhead"`, where every graph is captured as a CUDA graph.

The model has three layers with an activation between two of them. Each pair of features is tested together as well.
What is not to be had, and why, stands below.

This page is written by `./dev features`, which runs every case of its table.
"""


def cells():
    """The cases of the table, row by row."""
    return [FeatureCase(recipe, (name,)) for name in FEATURES for recipe in RECIPES]


def page(holds):
    """The text of the page.

    Args:
        holds: case of the table -> whether all of it holds; excluded ones need no entry.
    """
    rows = []
    for name in FEATURES:
        cases = [FeatureCase(recipe, (name,)) for recipe in RECIPES]
        cells = ["-" if case.excluded else "yes" if holds[case] else "**no**" for case in cases]
        rows.append([name, *cells])
    parts = [HEAD, _markdown(["feature", *RECIPES], rows), "## Not to be had\n"]
    refused = [
        [" + ".join([name, *never.features]), _where(never), never.reason]
        for name, feature in FEATURES.items()
        for never in feature.never
    ]
    parts.append(_markdown(["features", "where", "why"], refused))
    parts.append("## Where Inductor gives other bits\n")
    rounded = [[name, feature.rounds] for name, feature in FEATURES.items() if feature.rounds]
    parts.append(_markdown(["feature", "why"], rounded))
    return "\n".join(parts)


def _where(never):
    """The recipes and versions of torch that a rule is about."""
    first, after = never.torch
    recipes = [name for name, recipe in RECIPES.items() if never.recipe(recipe)]
    parts = [] if len(recipes) == len(RECIPES) else [", ".join(recipes)]
    if first > (2, 11):
        parts.append(f"torch {first[0]}.{first[1]} and later")
    if after < (3, 0):
        parts.append(f"torch before {after[0]}.{after[1]}")
    return "; ".join(parts) or "everywhere"


def _markdown(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(["| " + " | ".join(cells) + " |" for cells in lines]) + "\n"


def main():
    """Run all cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="aot_eager", help="how to compile")
    parser.add_argument("--only", default="", metavar="WORDS", help="print, do not write, these")
    options = parser.parse_args()
    holds = {}
    for case in cells():
        if case.excluded or not re.search(options.only, str(case)):
            continue
        torch._dynamo.reset()
        try:
            check(case, options.mode)
            holds[case] = True
        except Exception:  # noqa: BLE001  whatever it is, the table says no
            traceback.print_exc()
            holds[case] = False
        print(f"{'yes' if holds[case] else 'NO ':3} {case}", flush=True)
    if not options.only:
        PAGE.write_text(page(holds), encoding="utf-8")
    failed = [case for case, held in holds.items() if not held]
    print(table(["cases", "hold"], [[str(len(holds)), str(len(holds) - len(failed))]]))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
