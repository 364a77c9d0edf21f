"""Recipes of public datasets, for training and for evaluation; to add one, put a YAML file into datasets/recipes/."""

from functools import cache
from pathlib import Path

from lmm_r1.data.recipes.recipe import Recipe, read_recipe
from lmm_r1.dotted import nearest
from lmm_r1.errors import UserError

# In an installed wheel the YAML files are beside this module, in the repository they are data of their own.
_INSTALLED = Path(__file__).parent / "published"
_IN_REPOSITORY = Path(__file__).parents[3] / "datasets" / "recipes"


@cache
def _folder() -> Path:
    return _INSTALLED if _INSTALLED.is_dir() else _IN_REPOSITORY


@cache
def recipe_names() -> tuple[str, ...]:
    """Return the names of the ready-made recipes."""
    return tuple(sorted(path.stem for path in _folder().glob("*.yaml")))


def get_recipe(name: str, *, what: str = "recipe", names: tuple[str, ...] | None = None) -> Recipe:
    """Return a ready-made recipe by its name, or the one in a YAML file; raises UserError for an unknown name.

    Args:
        what: how a message calls it, the flag with it where there is one.
        names: those to choose from; None takes all.
    """
    if name.endswith((".yaml", ".yml")):
        return read_recipe(Path(name))
    known = recipe_names() if names is None else names
    if name not in known:
        match = nearest(name, known=known)
        hint = f"did you mean {match}?" if match else f"known are {', '.join(known)}, or the path of a YAML file"
        raise UserError(f"{what} {name}: no such {what.rpartition('--')[2]}; {hint}")
    return read_recipe(_folder() / f"{name}.yaml")
