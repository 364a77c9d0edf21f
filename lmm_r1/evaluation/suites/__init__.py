"""Ready-made recipes of benchmarks; to add one, put a YAML file beside the others, with the fields of `Recipe`."""

import difflib
from functools import cache
from pathlib import Path

from lmm_r1.errors import UserError
from lmm_r1.evaluation.suites.recipe import Recipe, Sampling, read_recipe
from lmm_r1.evaluation.suites.rows import check_embedded_images, load_suite

_FOLDER = Path(__file__).parent


@cache
def suite_names() -> tuple[str, ...]:
    """Return the names of the ready-made suites."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def get_suite(name: str) -> Recipe:
    """Return a ready-made suite by its name, or the one in a YAML file; raises UserError for an unknown name."""
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    if name not in suite_names():
        match = difflib.get_close_matches(name, suite_names(), n=1)
        hint = (
            f"did you mean {match[0]}?"
            if match
            else f"known are {', '.join(suite_names())}, or the path of a YAML file"
        )
        raise UserError(f"--suite {name}: no such suite; {hint}")
    return read_recipe(_FOLDER / f"{name}.yaml")
