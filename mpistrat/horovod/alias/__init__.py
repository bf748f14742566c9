"""A folder for PYTHONPATH with a module `horovod`; `mpistrat run --horovod` adds it."""
