"""Packages of the distribution; everything else stands in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

RECIPES = Path("datasets/recipes")
INSTALLED_RECIPES = Path("lmm_r1/tools/recipes/published")


class BuildWithRecipes(build_py):
    """A wheel holds the recipes of datasets/ beside the code that reads them; an editable install reads them there."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._recipes().items():
                self.mkpath(str(Path(target).parent))
                self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *self._recipes()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._recipes().values())]

    def _recipes(self) -> dict[str, str]:
        return {
            str(file): str(Path(self.build_lib) / INSTALLED_RECIPES / file.name)
            for file in sorted(RECIPES.glob("*.yaml"))
        }


setup(
    packages=find_packages(include=["lmm_r1", "lmm_r1.*", "remote_rm", "remote_rm.*"]),
    cmdclass={"build_py": BuildWithRecipes},
)
