"""File formats of others, which know nothing of runs.

``array_file`` says what every format offers to a reader: named arrays, by rows. ``safetensors``,
``hdf5`` (with ``hdf5_chunks`` for its large compressed chunks), ``numpy_files`` (with
``fortran_rows``), ``torch_file`` and ``step_folder`` (with ``folder_numbers``, for what differs
from file to file, and what a Trainer logged) each have a class that reads such a file, which is
checked as a whole before a value of it is read; ``open_file`` finds out which it is.
``safetensors`` and ``hdf5_writing`` also write, what ``streamed_tensor`` describes. A new format is
one such module and an entry in ``open_file``; `trajstore.exchange` decides what its arrays mean.
"""
