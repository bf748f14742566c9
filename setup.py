"""The long description and the links for package indexes, and the compiled loops; everything else is said in pyproject.toml."""

import os
import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# One module for all versions of Python from 3.11 on: before, the limited API has no buffers. A Python without the lock has none.
LIMITED = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")

LOOPS = Path("mpistrat/base/loops")


def described(readme: str) -> str:
    """The README for a page that has neither the files beside it nor names for its headings: such links become words."""

    def words(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"]
        if link["picture"]:
            return f"*{text}: {target}*"
        return text if target.startswith("#") or target == text else f"{text} ({target})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://)[^)\s]+)\)", words, readme)


def urls() -> dict[str, str]:
    """The links of the package: those of the repository that builds it, which its workflow names. None elsewhere."""
    repository = os.environ.get("MPISTRAT_REPOSITORY", "").rstrip("/")
    if not repository:
        return {}
    pages = {
        "Source": "",
        "Issues": "/issues",
        "Documentation": "/tree/HEAD/docs",
        "Changelog": "/blob/HEAD/CHANGELOG.md",
    }
    return {name: repository + page for name, page in pages.items()}


def compiled_loops() -> Extension:
    """The loops in C; where they cannot be built, the package is installed without, and uses NumPy."""
    return Extension(
        "mpistrat.base.loops._loops",
        sorted(map(str, LOOPS.glob("*.c"))),
        depends=sorted(map(str, LOOPS.glob("*.h"))),
        # No fused multiply-add, for NumPy's bits; a square root that sets no errno can be done in vectors.
        extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
        extra_link_args=["-pthread"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if LIMITED else [],
        py_limited_api=LIMITED,
        optional=True,
    )


class Wheel(bdist_wheel):
    """A wheel without the loops, where they could not be built, is for any platform: no installer takes it for one with them."""

    def run(self) -> None:
        self.run_command("build_ext")
        if not any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
            self.warn(
                "the compiled loops could not be built (is there a C compiler, and python3-dev?): the wheel is without them"
            )
            self.distribution.ext_modules = []
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=described(readme),
        long_description_content_type="text/markdown",
        project_urls=urls(),
        ext_modules=[compiled_loops()],
        cmdclass={"bdist_wheel": Wheel},
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED else {},
    )
