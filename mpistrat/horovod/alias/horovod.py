"""The module that `import horovod` finds under `mpistrat run --horovod`. It installs those of `mpistrat.horovod` instead."""

from mpistrat.horovod import install

install()
