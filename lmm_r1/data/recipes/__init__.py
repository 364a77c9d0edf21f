"""Recipes of public datasets, for training and for evaluation; to add one, add a YAML file to datasets/recipes/."""

from functools import cache
from pathlib import Path

from lmm_r1.data.recipes.recipe import Recipe, read_recipe
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError

# An installed wheel has the YAML files next to this module; the repository has them in a folder of its own.
_INSTALLED = Path(__file__).parent / "published"
_IN_REPOSITORY = Path(__file__).parents[3] / "datasets" / "recipes"


@cache
def _folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _IN_REPOSITORY


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of the built-in recipes."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def get_recipe(name: str, *, what: str = "recipe", names: tuple[str, ...] | None = None) -> Recipe:
    """Return a built-in recipe by its name, or the one in a YAML file; raises UserError for an unknown name.

    Args:
        what: what a message calls it, including its flag if there is one.
        names: the names to choose from; None allows all.
    """
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    known = recipe_names() if names is None else names
    if name not in known:
        match = nearest(name, known=known)
        hint = f"did you mean {match}?" if match else f"known are {', '.join(known)}, or the path of a YAML file"
        raise UserError(f"{what} {name}: no such {what.rpartition('--')[2]}; {hint}")
    return read_recipe(_folder() / f"{name}.yaml")
