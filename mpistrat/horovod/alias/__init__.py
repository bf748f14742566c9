"""A folder for PYTHONPATH, in which Python finds a module `horovod`; `mpistrat run --horovod` puts it there."""
