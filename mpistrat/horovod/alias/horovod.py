"""The module that `import horovod` finds under `mpistrat run --horovod`. Those of `mpistrat.horovod` take its place."""

from mpistrat.horovod import install

install()
