from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyMpistrat(PythonPackage):
    """Data-parallel training on clusters with MPI: strategies with the API of tf.distribute, for PyTorch, JAX, Keras 3
    and NumPy; sharded HDF5 input, checkpoints, parameter servers, and jobs that survive dead ranks."""

    pypi = "mpistrat/mpistrat-0.1.0.tar.gz"

    license("BSD-3-Clause")

    # Not released yet: `spack checksum py-mpistrat` gives the sum.
    version("0.1.0", sha256="0" * 64)

    variant("tables", default=False, description="Read Parquet, Arrow, CSV and JSON lines")
    variant("torch", default=False, description="Run modules of PyTorch")

    depends_on("c", type="build")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77.0.3:", type="build")
    depends_on("mpi", type=("build", "run"))
    depends_on("py-numpy@2:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-h5py@3.11:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
    depends_on("py-jinja2@3:", type=("build", "run"))
    depends_on("py-pyarrow@16:", type=("build", "run"), when="+tables")
    depends_on("py-torch@2.5:", type=("build", "run"), when="+torch")

    conflicts("platform=darwin", msg="mpistrat needs Linux")
    conflicts("platform=windows", msg="mpistrat needs Linux")

    import_modules = ["mpistrat", "mpistrat.base.loops._loops"]
